"""The sending half of a command stream: sends commands, matches results, detects silence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.any_pb2 import Any

from rlctl.contract.durations import set_duration
from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.ports import Clock, Link
from rlctl.v1.common_pb2 import OUTCOME_NOT_SENT, OUTCOME_UNKNOWN
from rlctl.v1.control_pb2 import (
    Attach,
    Attached,
    CancelCommand,
    CommandResult,
    ControlRequest,
    ControlResponse,
    Ping,
    ServingGrant,
)
from rlctl.v1.fleet_pb2 import StageReport

PING_EVERY_S = 1.0
SILENCE_S = 5.0
"""Seconds of pings without any message of the peer, even a pong, after which the link is closed."""

MOST_PENDING = 4096
"""Most commands under way to a peer, and so the most unsent commands to a peer that does not read."""

HOP_S = 0.25
"""Seconds reserved from a command's time budget per hop, at most a tenth. A receiver out of time can then still report
the known results of its ranks before this side stops waiting.
"""


def taken_along(remaining_s: float) -> float:
    """Return the time budget for the next hop."""
    return remaining_s - min(HOP_S, remaining_s / 10)


@dataclass(eq=False, slots=True)
class Issued:
    """A command that was sent.

    Attributes:
        request: the verb, packed.
        deadline: on the clock's ``now``.
        accepted: done when the peer has checked the command and will run it, or has answered.
        result: the answer. Fails with LINK_LOST, outcome UNKNOWN, if the link breaks and no repeat follows.
        again: the command may be repeated over a new link to the same peer.
    """

    command_id: str
    operation_id: str
    request: Any
    deadline: float
    accepted: asyncio.Future[None]
    result: asyncio.Future[CommandResult]
    again: bool = True

    def fail(self) -> None:
        """Fail the command with an unknown outcome after the link broke."""
        _settle(self, Reason.LINK_LOST.error(outcome=OUTCOME_UNKNOWN))


def _fail_all(lost: Sequence[Issued]) -> None:
    for issued in lost:
        issued.fail()


class Commander:
    """Commands one peer over one link. The commander ends with the link; a new link gets a new commander."""

    def __init__(
        self,
        link: Link[ControlRequest, ControlResponse],
        clock: Clock,
        *,
        on_report: Callable[[StageReport], None] = lambda _: None,
        on_lost: Callable[[Sequence[Issued]], None] = _fail_all,
        silence_s: float = SILENCE_S,
        starting_s: float = 0.0,
    ) -> None:
        """``on_lost`` gets the commands without an answer at the link's end, in the order of sending.

        ``starting_s``: further seconds of silence that a peer has until the answer to the attach.
        """
        self._link = link
        self._clock = clock
        self._on_report = on_report
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._starting_s = starting_s
        self._pending: dict[str, Issued] = {}
        self._attached: asyncio.Future[Attached] | None = None
        self._lost: RlctlError | None = None
        self.last_heard = clock.now()
        self.echo = 0
        """Newest time of the peer's own clock, received at ``echoed_at``."""
        self.echoed_at = float("-inf")

    @property
    def lost(self) -> bool:
        return self._lost is not None

    async def attach(self, attach: Attach) -> Attached:
        """Attach to the peer. Raises the peer's refusal, the error that ended the stream, or LINK_LOST."""
        self._attached = asyncio.get_running_loop().create_future()
        self._send(ControlRequest(attach=attach))
        attached = await self._attached
        if attached.HasField("error"):
            raise from_detail(attached.error)
        return attached

    def issue(self, command_id: str, operation_id: str, request: Any, deadline: float, *, again: bool = True) -> Issued:
        """Send a command; ``deadline`` is on the clock's ``now``. Never blocks; failures are in the result.

        An id without an answer on this link is not sent again: both calls wait for the same answer. With a different
        body the result is REQUEST_ID_REUSED. Beyond MOST_PENDING it is TOO_MANY_REQUESTS, and nothing is sent.
        """
        pending = self._pending.get(command_id)
        if pending is not None and pending.request == request:
            return pending
        loop = asyncio.get_running_loop()
        issued = Issued(command_id, operation_id, request, deadline, loop.create_future(), loop.create_future(), again)
        try:
            if pending is not None:
                raise Reason.REQUEST_ID_REUSED.error(f"command {command_id} is under way with another body")
            if len(self._pending) >= MOST_PENDING:
                raise Reason.TOO_MANY_REQUESTS.error(
                    f"{MOST_PENDING} commands are under way to this peer", outcome=OUTCOME_NOT_SENT
                )
            self._ask(issued)
        except RlctlError as error:
            _settle(issued, error)
        return issued

    def ask_again(self, issued: Issued) -> None:
        """Repeat a command of an earlier link to the same peer. The peer attaches it to the run of that id, if any."""
        try:
            self._ask(issued)
        except RlctlError:
            issued.fail()

    def _ask(self, issued: Issued) -> None:
        remaining = issued.deadline - self._clock.now()
        if remaining <= 0:
            raise Reason.DEADLINE_EXCEEDED.error(
                "the time was up before the command was sent", outcome=OUTCOME_NOT_SENT
            )
        # Filled in place: protobuf copies a command that is assigned to a message, and there may be a thousand.
        message = ControlRequest()
        command = message.command
        command.command_id = issued.command_id
        command.operation_id = issued.operation_id
        set_duration(command.time_remaining, taken_along(remaining))
        command.request.CopyFrom(issued.request)
        self._send(message)
        self._pending[issued.command_id] = issued

    def cancel(self, command_id: str) -> None:
        """Ask the peer to withdraw a command that has not started, and never repeat that command."""
        if command_id in self._pending:
            self._pending[command_id].again = False
        with contextlib.suppress(RlctlError):
            self._send(ControlRequest(cancel=CancelCommand(command_id=command_id)))

    def grant(self, grant: ServingGrant) -> None:
        """Send the admitted versions and the lease. Lost with the link."""
        with contextlib.suppress(RlctlError):
            self._send(ControlRequest(grant=grant))

    async def close(self) -> None:
        await self._link.close()

    async def run(self) -> None:
        """Receive until the link ends, then pass pending commands to ``on_lost``. Cancelling closes the link."""
        pinger = asyncio.create_task(self._ping())
        ended = Reason.LINK_LOST.error(outcome=OUTCOME_UNKNOWN)
        try:
            async for message in self._link.receive():
                self.last_heard = self._clock.now()
                if message.sent_at > self.echo:
                    self.echo, self.echoed_at = message.sent_at, self.last_heard
                self._take(message)
        except RlctlError as error:
            ended = error
            raise
        finally:
            pinger.cancel()
            self._fail(ended)
            await self._link.close()

    def _take(self, message: ControlResponse) -> None:
        match message.WhichOneof("message"):
            case "attached":
                if self._attached is not None and not self._attached.done():
                    self._attached.set_result(message.attached)
            case "accepted":
                issued = self._pending.get(message.accepted.command_id)
                if issued is not None and not issued.accepted.done():
                    issued.accepted.set_result(None)
            case "result":
                issued = self._pending.pop(message.result.command_id, None)
                if issued is not None:
                    _settle(issued, message.result)
            case "report":
                self._on_report(message.report)

    async def _ping(self) -> None:
        nonce = unanswered = 0
        heard, echoed = self.last_heard, self.echoed_at
        while not self.lost:
            await asyncio.sleep(PING_EVERY_S)
            # Counted in turns, not in time: a stopped process sends no pings.
            unanswered = unanswered + 1 if self.last_heard == heard else 0
            has_echo = self.echoed_at != echoed
            heard, echoed = self.last_heard, self.echoed_at
            starting = self._attached is not None and not self._attached.done()
            if unanswered * PING_EVERY_S >= self._silence_s + starting * self._starting_s:
                await self._link.close()
                return
            if has_echo:  # just now: skip one turn, since this halves the cost of an idle fleet
                continue
            nonce += 1
            with contextlib.suppress(RlctlError):
                self._send(ControlRequest(ping=Ping(nonce=nonce)))

    def _send(self, message: ControlRequest) -> None:
        if self._lost is not None:
            raise Reason.LINK_LOST.error("the link had ended before the command was sent", outcome=OUTCOME_NOT_SENT)
        try:
            self._link.send(message)
        except RlctlError as error:
            error.outcome = OUTCOME_NOT_SENT
            raise

    def _fail(self, error: RlctlError) -> None:
        self._lost = error
        if self._attached is not None and not self._attached.done():
            self._attached.set_exception(error)
        lost, self._pending = list(self._pending.values()), {}
        self._on_lost(lost)


def _settle(issued: Issued, result: CommandResult | RlctlError) -> None:
    if not issued.result.done():
        if isinstance(result, RlctlError):
            issued.result.set_exception(result)
            issued.result.exception()  # marks the error as retrieved: the result may have no waiting task
        else:
            issued.result.set_result(result)
    if not issued.accepted.done():
        issued.accepted.set_result(None)
