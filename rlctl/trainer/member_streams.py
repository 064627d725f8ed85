"""The ranks of one trainer: a stream from every member to the lead, which alone talks to the coordinator.

A stream, and not the trainer's own collectives: the loss of a rank breaks the stream at once, on every kind of group. A
failed rank can report at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.runtime.addresses import join as join_address
from rlctl.trainer.pending_update import UpdateState
from rlctl.trainer.source_rank import detail
from rlctl.transport.handlers import generic_handler
from rlctl.transport.links import DialledLink, GrpcDialer, ServedLink, serve_links
from rlctl.transport.server import GrpcServer
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role
from rlctl.v1 import trainer_pb2
from rlctl.v1.common_pb2 import ErrorDetail
from rlctl.v1.trainer_pb2 import JoinRequest, JoinResponse, Offer, Sent, Shipment
from rlctl.v1.trainer_pb2_grpc import TrainerServiceStub

SERVICE = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"]


_FOR_GOOD = (1 << 31) - 1
"""Attempt number for all attempts, also later attempts: this rank takes part in no attempt."""

MISSED = 8
"""Kept per member: ends of updates that the member missed, and its updates that failed before it joined."""

_IN_CONFLICT = ("", Reason.FIELD_CONFLICT.name)
"""Reasons of a failed call after the lead reported a version conflict; "" before the member's report."""


@dataclass
class _Call:
    """A member's call of update.

    Attributes:
        number: the member's own count.
        version: label of the call.
        latest: the member's last message.
    """

    number: int
    version: str
    latest: JoinRequest


class Members:
    """The lead's side: every other rank of the trainer.

    An update is one call at every rank. Calls belong together by order: a member's oldest unanswered call is the part
    in the lead's present update. Counts of ranks may differ, because a rank was not called or failed before joining. A
    failed call is not a part in an update to a different version, even if the failure arrives after the begin. A late
    member receives the end of the update.

    Attributes:
        shipments: segments written by members, in order of arrival.
    """

    def __init__(self, size: int) -> None:
        """``size``: number of trainer ranks, including the lead."""
        self._ranks = range(1, size)
        self._links: dict[int, ServedLink] = {}
        self._version = ""
        self._present: dict[int, _Call] = {}
        self._waiting: dict[int, deque[_Call]] = {rank: deque() for rank in self._ranks}
        self._newest = dict.fromkeys(self._ranks, 0)
        self._missed: dict[int, deque[tuple[str, JoinResponse]]] = {rank: deque(maxlen=MISSED) for rank in self._ranks}
        # A member waits for the answer to a shipment before the next one.
        self.shipments: asyncio.Queue[JoinRequest] = asyncio.Queue()
        self._lost: RlctlError | None = None
        self._news = asyncio.Event()
        self._server: GrpcServer | None = None

    async def start(self, host: str, tls: Tls | None = None) -> tuple[str, str]:
        """Serve on a free TCP port of ``host`` and return the address and the members' token. Raises TLS_INVALID."""
        if tls is not None:
            tls.require(Role.TRAINER, Role.COORDINATOR)
        token = secrets.token_urlsafe(32)
        handler = generic_handler(SERVICE, {"Join": serve_links(self.listen)})
        self._server = GrpcServer([(SERVICE, handler)], token=token, tls=tls)
        return await self._server.start(join_address(host, 0)), token

    async def close(self) -> None:
        """Close the streams of the members."""
        if self._server is not None:
            for link in self._links.values():
                link.end()
            await self._server.stop(0.5)

    @contextlib.contextmanager
    def update(self, version: str, state: UpdateState) -> Iterator[None]:
        """Run the lead's part in an update, and send an error of the update to the members.

        If a cancelled update has a version, the members get the ended operation instead.
        """
        self._version, self._present = version, {}
        try:
            yield
        except BaseException as error:
            operation = state.ended_operation if isinstance(error, asyncio.CancelledError) else None
            served = operation is not None and bool(operation.weight_version.sequence)
            failed = JoinResponse(failed=detail(error), outcome=state.outcome)
            self.end(JoinResponse(ended=operation) if served else failed)
            raise

    def fail(self, version: str, error: ErrorDetail) -> None:
        """Send the members an update that failed at the lead before they could join."""
        self._version, self._present = version, {}
        self.end(JoinResponse(failed=error))

    def tell(self, message: JoinResponse) -> None:
        """Send a message to every member that has joined. A lost member shows when answers are collected."""
        for rank in self._present:
            self.answer(rank, message)

    def answer(self, rank: int, message: JoinResponse) -> None:
        """Send a message to one member, if the member has joined."""
        if rank in self._present:
            self._send(rank, self._present[rank].number, message)

    def end(self, message: JoinResponse) -> None:
        """Send every member the end of the update. A later member receives it on joining."""
        for rank in self._ranks:
            waiting = self._waiting[rank]
            if rank not in self._present and waiting and waiting[0].version == self._version:
                self._present[rank] = waiting.popleft()
            if rank not in self._present:
                self._missed[rank].append((self._version, message))
        self.tell(message)
        self._present = {}

    async def offers(self) -> dict[int, Offer]:
        """Return the offer of every member, by rank.

        Raises FIELD_CONFLICT if a member waits in an update to a different version, or the first error of a member.
        """
        return {rank: request.offer for rank, request in (await self._collect(0)).items()}

    async def sent(self, attempt: int) -> dict[int, Sent]:
        """Return the results of every member in an attempt, by rank. Raises the first error of a member."""
        return {rank: request.sent for rank, request in (await self._collect(attempt)).items()}

    async def stopped(self, attempt: int) -> None:
        """Wait until every member has ended an attempt, with any result. Raises TRAINER_RANK_LOST."""
        while not all(call.latest.attempt >= attempt for call in self._present.values()):
            await self._more()

    def waits(self, shipped: JoinRequest, attempt: int) -> bool:
        """Whether the member waits for an answer to this shipment: the shipment belongs to this attempt, not to a
        stopped attempt.
        """
        call = self._present.get(shipped.rank)
        return call is not None and (shipped.update, shipped.attempt) == (call.number, attempt)

    async def _collect(self, attempt: int) -> dict[int, JoinRequest]:
        while True:
            self._take_in()
            answers = {rank: call.latest for rank, call in self._present.items() if call.latest.attempt >= attempt}
            for rank, request in sorted(answers.items()):
                if request.HasField("failed"):
                    if self._is_elsewhere(rank):
                        raise self._conflict(rank)
                    error = from_detail(request.failed)
                    error.message = f"trainer rank {rank}: {error.message}"
                    raise error
            if len(answers) == len(self._ranks) and not any(self._is_elsewhere(rank) for rank in answers):
                return answers
            await self._more()

    def _take_in(self) -> None:
        """Match the members' calls with the present update.

        Only the member knows whether a call still waits for a different version. The lead reports the conflict. The
        member fails with the conflict or, if the call ended before, with a different reason.
        """
        for rank, waiting in self._waiting.items():
            if self._is_elsewhere(rank) and self._present[rank].latest.failed.reason not in _IN_CONFLICT:
                del self._present[rank]
            while waiting and rank not in self._present:
                call = waiting.popleft()
                if call.version == self._version:
                    self._present[rank] = call
                elif not call.latest.HasField("failed"):
                    self._present[rank] = call
                    self.answer(rank, JoinResponse(failed=self._conflict(rank).detail()))

    def _is_elsewhere(self, rank: int) -> bool:
        return rank in self._present and self._present[rank].version != self._version

    def _conflict(self, rank: int) -> RlctlError:
        return Reason.FIELD_CONFLICT.error(
            f"trainer rank {rank} updates to {self._present[rank].version!r}, rank 0 to {self._version!r}",
            field="version",
        )

    async def _more(self) -> None:
        """Wait for a message. Raises TRAINER_RANK_LOST after the loss of a member."""
        if self._lost is not None:
            raise self._lost
        self._news.clear()
        await self._news.wait()

    async def listen(self, link: ServedLink) -> None:
        """Serve the stream of a member until its end."""
        rank = 0
        try:
            async for message in link.receive():
                rank = message.rank
                if rank not in self._ranks or self._links.setdefault(rank, link) is not link:
                    return
                if message.HasField("shipment"):
                    self.shipments.put_nowait(message)
                    continue
                self._heard(rank, message)
                self._news.set()
        finally:
            if self._links.get(rank) is link:
                self._lost = Reason.TRAINER_RANK_LOST.error(f"trainer rank {rank} is gone")
                self._news.set()

    def _heard(self, rank: int, message: JoinRequest) -> None:
        if message.update > self._newest[rank]:
            self._newest[rank] = message.update
            version = message.version or message.offer.version
            while self._missed[rank]:
                missed, ending = self._missed[rank].popleft()
                if missed == version:
                    self._send(rank, message.update, ending)
                    return
            self._waiting[rank].append(_Call(message.update, version, message))
            return
        present = self._present.get(rank)
        for call in [*self._waiting[rank], *([present] if present else [])]:
            if call.number == message.update:
                call.latest = message

    def _send(self, rank: int, update: int, message: JoinResponse) -> None:
        addressed = JoinResponse(update=update)
        addressed.MergeFrom(message)
        with contextlib.suppress(RlctlError):
            self._links[rank].send(addressed)


class Lead:
    """A member's side: the stream to the lead."""

    def __init__(self, rank: int, link: DialledLink) -> None:
        self._rank = rank
        self._link = link
        self._updates = 0
        self._heard: asyncio.Queue[JoinResponse | RlctlError] = asyncio.Queue()  # a few messages in each update
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def join(cls, rank: int, address: str, token: str, tls: Tls | None = None) -> Lead:
        """Connect to the lead. Raises UNREACHABLE, TLS_FAILED."""
        dialer = GrpcDialer(TrainerServiceStub, token, tls, Role.TRAINER, method="Join")
        return cls(rank, await dialer.dial(address))

    async def close(self) -> None:
        """Close the stream. Updates under way fail on every rank."""
        self._listening.cancel()
        await self._link.close()

    @contextlib.contextmanager
    def update(self, version: str) -> Iterator[int]:
        """Run this rank's part in an update and report an error to the lead. Yields the update's number."""
        self._updates += 1
        update = self._updates
        try:
            yield update
        except BaseException as error:
            self._report(update, version, detail(error))
            raise

    def fail(self, version: str, error: ErrorDetail) -> None:
        """Report an update that failed at this rank before the rank joined.

        Without the report, the lead would end a later update of this label at this rank.
        """
        self._updates += 1
        self._report(self._updates, version, error)

    def _report(self, update: int, version: str, error: ErrorDetail) -> None:
        with contextlib.suppress(RlctlError):
            self.say(update, _FOR_GOOD, failed=error, version=version)

    def say(
        self,
        update: int,
        attempt: int,
        *,
        offer: Offer | None = None,
        sent: Sent | None = None,
        failed: ErrorDetail | None = None,
        shipment: Shipment | None = None,
        version: str = "",
    ) -> None:
        """Send a message to the lead. Raises TRAINER_RANK_LOST."""
        try:
            self._link.send(
                JoinRequest(
                    rank=self._rank,
                    update=update,
                    attempt=attempt,
                    offer=offer,
                    sent=sent,
                    failed=failed,
                    shipment=shipment,
                    version=version,
                )
            )
        except RlctlError as error:
            raise _lead_lost(error.message) from None

    async def hear(self, update: int) -> JoinResponse:
        """Return the next message of this update; messages of earlier updates are dropped.

        Raises TRAINER_RANK_LOST if the lead is gone.
        """
        while True:
            heard = await self._heard.get()
            if isinstance(heard, RlctlError):
                self._heard.put_nowait(heard)  # for the next call
                raise heard
            if heard.update == update:
                return heard

    async def _listen(self) -> None:
        cause = "its stream ended"
        try:
            async for message in self._link.receive():
                self._heard.put_nowait(message)
        except RlctlError as error:
            cause = error.message
        self._heard.put_nowait(_lead_lost(cause))


def share(group: dist.ProcessGroup, text: str) -> str:
    """Send a short text from rank 0 of a process group to all ranks. Every rank calls this. Blocks.

    A group without a backend for the host sends over the GPU that is the calling thread's current device.
    """
    device = torch.device("cpu")
    if "cpu:" not in dist.get_backend_config(group):
        device = torch.device("cuda", torch.cuda.current_device())
    root = dist.get_global_rank(group, 0)
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    length = torch.tensor([data.numel()], device=device)
    dist.broadcast(length, root, group=group)
    if dist.get_rank(group) != 0:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(data, root, group=group)
    return bytes(data.tolist()).decode()


def _lead_lost(why: str) -> RlctlError:
    return Reason.TRAINER_RANK_LOST.error(f"trainer rank 0, which leads the updates, is gone: {why}")


__all__ = ["MISSED", "Lead", "Members", "share"]
