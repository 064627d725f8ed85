"""The ranks of one trainer: a stream from every member to the lead, which alone talks to the coordinator.

A stream, not the trainer's own collectives: a rank that is gone breaks its stream at once, on every kind of group, and
a rank that has failed can say so whatever the others are doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import torch
import torch.distributed as dist

from rlctl.errors import Reason, RlctlError, from_detail
from rlctl.transport.addresses import join as join_address
from rlctl.transport.handlers import generic_handler
from rlctl.transport.links import DialledLink, GrpcDialer, ServedLink, serve_links
from rlctl.transport.server import GrpcServer
from rlctl.v1 import trainer_pb2
from rlctl.v1.common_pb2 import ErrorDetail
from rlctl.v1.trainer_pb2 import JoinRequest, JoinResponse, Offer, Sent, Shipment
from rlctl.v1.trainer_pb2_grpc import TrainerServiceStub

SERVICE = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"]


class Members:
    """The lead's side: every other rank of the trainer.

    Attributes:
        shipments: segments that members have written, in the order in which they came.
    """

    def __init__(self, size: int) -> None:
        """``size``: ranks of the trainer, the lead included."""
        self._ranks = range(1, size)
        self._links: dict[int, ServedLink] = {}
        self._said: dict[int, JoinRequest] = {}
        self.shipments: asyncio.Queue[JoinRequest] = asyncio.Queue()
        self._lost: RlctlError | None = None
        self._news = asyncio.Event()
        self._server: GrpcServer | None = None

    async def start(self, host: str) -> tuple[str, str]:
        """Serve on a free port of ``host``; returns the address and the token for the members."""
        token = secrets.token_urlsafe(32)
        handler = generic_handler(SERVICE, {"Join": serve_links(self._listen)})
        self._server = GrpcServer([(SERVICE, handler)], token=token)
        return await self._server.start(join_address(host, 0)), token

    async def close(self) -> None:
        """Let the members go."""
        if self._server is not None:
            for link in self._links.values():
                link.end()
            await self._server.stop(0.5)

    def tell(self, message: JoinResponse) -> None:
        """Send a message to every member; one that is gone shows when its answer is collected."""
        for link in self._links.values():
            with contextlib.suppress(RlctlError):
                link.send(message)

    def answer(self, rank: int, message: JoinResponse) -> None:
        """Send a message to one member."""
        with contextlib.suppress(RlctlError):
            self._links[rank].send(message)

    async def offers(self, update: int) -> dict[int, Offer]:
        """What every member brings to an update, by rank. Raises what the first said that cannot go on."""
        return {rank: said.offer for rank, said in (await self._collect(update, 0)).items()}

    async def sent(self, update: int, attempt: int) -> dict[int, Sent]:
        """What every member sent in an attempt, by rank. Raises what the first said that cannot go on."""
        return {rank: said.sent for rank, said in (await self._collect(update, attempt)).items()}

    async def stopped(self, update: int, attempt: int) -> None:
        """Wait until every member has ended an attempt, well or not. Raises TRAINER_RANK_LOST."""
        while not all(self._ended(rank, update, attempt) for rank in self._ranks):
            await self._more()

    async def _collect(self, update: int, attempt: int) -> dict[int, JoinRequest]:
        while True:
            now = {rank: said for rank, said in self._said.items() if (said.update, said.attempt) >= (update, attempt)}
            for rank, said in sorted(now.items()):
                if said.HasField("failed"):
                    error = from_detail(said.failed)
                    error.message = f"trainer rank {rank}: {error.message}"
                    raise error
                if said.update > update:
                    raise Reason.FIELD_CONFLICT.error(f"trainer rank {rank} is at its update {said.update} already")
            if len(now) == len(self._ranks):
                return now
            await self._more()

    def _ended(self, rank: int, update: int, attempt: int) -> bool:
        said = self._said.get(rank)
        return said is not None and (said.update, said.attempt) >= (update, attempt)

    async def _more(self) -> None:
        """Wait for something new. Raises TRAINER_RANK_LOST once a member is gone."""
        if self._lost is not None:
            raise self._lost
        self._news.clear()
        await self._news.wait()

    async def _listen(self, link: ServedLink) -> None:
        rank = 0
        try:
            async for message in link.receive():
                rank = message.rank
                if rank not in self._ranks or self._links.setdefault(rank, link) is not link:
                    return
                if message.HasField("shipment"):
                    self.shipments.put_nowait(message)
                    continue
                self._said[rank] = message
                self._news.set()
        finally:
            if self._links.get(rank) is link:
                self._lost = Reason.TRAINER_RANK_LOST.error(f"trainer rank {rank} is gone")
                self._news.set()


class Lead:
    """A member's side: its stream to the lead."""

    def __init__(self, rank: int, link: DialledLink) -> None:
        self._rank = rank
        self._link = link
        self._heard: asyncio.Queue[JoinResponse | RlctlError] = asyncio.Queue()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def join(cls, rank: int, address: str, token: str) -> Lead:
        """Connect to the lead. Raises UNREACHABLE."""
        return cls(rank, await GrpcDialer(TrainerServiceStub, token, method="Join").dial(address))

    async def close(self) -> None:
        """Leave; updates under way fail on every rank."""
        self._listening.cancel()
        await self._link.close()

    def say(
        self,
        update: int,
        attempt: int,
        *,
        offer: Offer | None = None,
        sent: Sent | None = None,
        failed: ErrorDetail | None = None,
        shipment: Shipment | None = None,
    ) -> None:
        """Tell the lead. Raises TRAINER_RANK_LOST."""
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
                )
            )
        except RlctlError as error:
            raise _lead_lost(error.message) from None

    async def hear(self, update: int) -> JoinResponse:
        """The next message of this update; those of earlier ones have nothing to say any more.

        Raises TRAINER_RANK_LOST when the lead is gone.
        """
        while True:
            heard = await self._heard.get()
            if isinstance(heard, RlctlError):
                self._heard.put_nowait(heard)  # for whoever asks again
                raise heard
            if heard.update == update:
                return heard

    async def _listen(self) -> None:
        why = "its stream ended"
        try:
            async for message in self._link.receive():
                self._heard.put_nowait(message)
        except RlctlError as error:
            why = error.message
        self._heard.put_nowait(_lead_lost(why))


def share(group: dist.ProcessGroup, text: str) -> str:
    """Hand a short text from rank 0 of a process group to all of its ranks; every rank calls it. Blocks.

    A group without a backend for the host takes it over the GPU that is the calling thread's current one.
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


__all__ = ["Lead", "Members", "share"]
