"""The receiving half of a command stream: runs each command at most once, and records the result."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import VERBS, of_request
from rlctl.engine import Call
from rlctl.ports import Clock, Link
from rlctl.runtime.logs import bound
from rlctl.runtime.shielding import shielded
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, Outcome
from rlctl.v1.control_pb2 import (
    Attach,
    Attached,
    Command,
    CommandAccepted,
    CommandResult,
    ControlRequest,
    ControlResponse,
    Pong,
    ServingGrant,
)

log = logging.getLogger(__name__)

REMEMBERED = 4096
"""Number of ended commands whose results are kept for repeats."""

REMEMBERED_BYTES = 64 << 10
"""Bytes above which a result counts as large. A list of a model's tensors has megabytes."""

LARGE_BYTES = 16 << 20
"""Most bytes of recorded large results of reads. Above it, the oldest ones are dropped, but not the latest.

A dropped read does not run at every rank again if it is repeated: ranks with a smaller result answer from the record.
"""

MOST_BYTES = 63 << 20
"""Most bytes of a result that is sent. A larger result would break the stream (transport/channel.py) with all commands
under way, and the next stream at each repeat.
"""

_REQUESTS = {verb.request.DESCRIPTOR.full_name: verb.request for verb in VERBS.values()}


class Commanded(Protocol):
    """The commanded side of an executor: a stage, or a follower rank's worker."""

    async def attach(self, attach: Attach, link: Link[ControlResponse, ControlRequest]) -> Attached:
        """Accept or refuse a commander. The reports go to the link of the accepted commander."""

    def obeys(self, link: Link[ControlResponse, ControlRequest]) -> bool:
        """Whether the link belongs to the accepted commander. Messages of other links have no effect."""

    def grant(self, grant: ServingGrant) -> None:
        """Take a serving grant."""

    async def carry_out(self, request: Message, call: Call) -> CommandResult:
        """Run a command. Failures are in the result; an exception is a defect."""

    def refuse(self, error: RlctlError) -> CommandResult:
        """Return the result of a command that was refused before any check."""

    async def withdraw(self, command_id: str) -> None:
        """Withdraw a command that has not started."""


@dataclass(slots=True)
class _Record:
    """A command.

    Attributes:
        task: the run; None after its end.
        result: the serialised result after the end. The task with its message would take ten times the memory.
        accepted: the command will run.
        watchers: callbacks of the acceptance.
        askers: callbacks of the result.
    """

    digest: bytes
    task: asyncio.Task[CommandResult] | None = None
    result: bytes = b""
    accepted: bool = False
    watchers: list[Callable[[], None]] = field(default_factory=list)
    askers: list[Callable[[CommandResult], None]] = field(default_factory=list)

    def accept(self) -> None:
        """Accept the command and call each watcher once."""
        self.accepted = True
        while self.watchers:
            self.watchers.pop(0)()

    def end(self, result: CommandResult, body: bytes) -> None:
        """Record the result and call the askers."""
        self.task, self.result = None, body
        self.watchers.clear()
        while self.askers:
            self.askers.pop(0)(result)


class Executor:
    """Runs commands of a stream or of unary calls on a :class:`Commanded`."""

    def __init__(self, commanded: Commanded, clock: Clock) -> None:
        self._commanded = commanded
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._large: OrderedDict[str, int] = OrderedDict()
        """Bytes of the recorded large results of reading commands, by command id."""

    async def execute(
        self,
        command_id: str,
        request: Any,
        remaining_s: float,
        on_accepted: Callable[[], None] = lambda: None,
        *,
        together: bool = False,
    ) -> CommandResult:
        """Run a command, attach to the run with the same id, or return the recorded result.

        The run continues after a cancellation of the caller. The same id with a different body is refused.
        """
        try:
            record = self._start(command_id, request, remaining_s, on_accepted, together=together)
        except RlctlError as error:
            return self._commanded.refuse(error)
        return CommandResult.FromString(record.result) if record.task is None else await shielded(record.task)

    def _start(
        self, command_id: str, request: Any, remaining_s: float, on_accepted: Callable[[], None], *, together: bool
    ) -> _Record:
        """Return the record of this id; starts the command if new. Raises REQUEST_ID_REUSED."""
        digest = hashlib.sha256(request.type_url.encode() + b"\0" + request.value).digest()
        record = self._records.get(command_id)
        if record is not None and record.digest != digest:
            raise Reason.REQUEST_ID_REUSED.error(f"command {command_id} had another body")
        if record is None:
            record = self._records[command_id] = _Record(digest)
            deadline = self._clock.now() + remaining_s
            call = Call(command_id=command_id, deadline=deadline, accept=record.accept, together=together)
            record.task = asyncio.create_task(self._run(record, request, call))
            self._forget()
        if record.task is not None and record.accepted:
            on_accepted()
        elif record.task is not None:
            record.watchers.append(on_accepted)
        return record

    async def serve(self, link: Link[ControlResponse, ControlRequest]) -> None:
        """Obey a stream until its end. Running commands then continue, and their results are recorded.

        If the commander was not accepted, or was replaced, commands are refused; cancellations and grants are ignored.
        """
        tasks: set[asyncio.Task[None]] = set()
        attaching: asyncio.Task[None] | None = None

        def start(work: Coroutine[object, object, None]) -> asyncio.Task[None]:
            task = asyncio.create_task(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return task

        try:
            async for message in link.receive():
                match message.WhichOneof("message"):
                    case "attach":  # loading an engine takes minutes, and pings need answers meanwhile
                        attaching = start(self._attach(message.attach, link))
                    case "command" if not self._commanded.obeys(link):
                        error = Reason.EPOCH_FENCED.error(
                            "this stream's commander was not accepted, or has been replaced"
                        )
                        self._answer(link, message.command, self._commanded.refuse(error))
                    case "command":
                        self._obey(link, message.command)
                    case "cancel" if self._commanded.obeys(link):
                        start(self._commanded.withdraw(message.cancel.command_id))
                    case "grant" if self._commanded.obeys(link):
                        self._commanded.grant(message.grant)
                    case "ping":
                        _reply(link, ControlResponse(pong=Pong(nonce=message.ping.nonce), sent_at=self._now()))
        finally:
            if attaching is not None:
                attaching.cancel()

    async def _attach(self, attach: Attach, link: Link[ControlResponse, ControlRequest]) -> None:
        try:
            attached = await self._commanded.attach(attach, link)
        except Exception as error:  # noqa: BLE001 - the commander would otherwise wait for minutes
            attached = Attached(error=Reason.INTERNAL.error(f"{type(error).__name__}: {error}").detail())
        _reply(link, ControlResponse(attached=attached, sent_at=self._now()))

    def _now(self) -> int:
        return max(1, int(self._clock.uptime() * 1e6))

    def _obey(self, link: Link[ControlResponse, ControlRequest], command: Command) -> None:
        """Run a command and answer over the same link.

        No task waits for the command: the end of the run sends the answer.
        """

        def accepted() -> None:
            _reply(link, ControlResponse(accepted=CommandAccepted(command_id=command.command_id)))

        try:
            record = self._start(
                command.command_id, command.request, seconds(command.time_remaining), accepted, together=True
            )
        except RlctlError as error:
            self._answer(link, command, self._commanded.refuse(error))
            return
        if record.task is None:
            self._answer(link, command, CommandResult.FromString(record.result))
        else:
            record.askers.append(functools.partial(self._answer, link, command))

    def _answer(self, link: Link[ControlResponse, ControlRequest], command: Command, result: CommandResult) -> None:
        response = ControlResponse(sent_at=self._now())
        response.result.CopyFrom(result)
        response.result.command_id = command.command_id
        _reply(link, response)

    async def _run(self, record: _Record, packed: Any, call: Call) -> CommandResult:
        mutates = False
        try:
            request = unpack(packed)
            verb = of_request(request)
        except RlctlError as error:
            result = self._commanded.refuse(error)
        else:
            mutates = verb.mutates(request)
            fence = request.header.fence  # type: ignore[attr-defined]
            operation = call.command_id.partition("/")[0]
            try:
                with bound(operation=operation, verb=verb.name, update=fence.update_id, epoch=fence.fleet_epoch):
                    result = await self._commanded.carry_out(request, call)
            except Exception as defect:  # without an answer the commander would wait until the deadline
                log.exception("%s could not be answered", verb.name)
                cause = f"{type(defect).__name__}: {defect}"
                result = self._commanded.refuse(Reason.INTERNAL.error(cause, outcome=verb.after_defect(request)))
        body = result.SerializeToString()
        if len(body) > MOST_BYTES:
            result = self._commanded.refuse(_too_large(len(body), OUTCOME_UNKNOWN if mutates else OUTCOME_REJECTED))
            body = result.SerializeToString()
        if len(body) > REMEMBERED_BYTES and not mutates:
            self._keep_large(call.command_id, len(body))
        record.end(result, body)
        return result

    def _keep_large(self, command_id: str, size: int) -> None:
        """Record the size of a large result, and drop the oldest ones above LARGE_BYTES. Their repeats run again."""
        self._large[command_id] = size
        while sum(self._large.values()) > LARGE_BYTES and len(self._large) > 1:
            oldest, _ = self._large.popitem(last=False)
            self._records.pop(oldest, None)

    def _forget(self) -> None:
        while len(self._records) > REMEMBERED:
            ended = (key for key, record in self._records.items() if record.task is None or record.task.done())
            oldest = next(ended, None)
            if oldest is None:
                return
            del self._records[oldest]
            self._large.pop(oldest, None)


def unpack(packed: Any) -> Message:
    """Return the verb request of a command. Raises VERB_UNKNOWN, or FIELD_INVALID if parsing fails."""
    name = packed.type_url.rpartition("/")[2]
    try:
        return _REQUESTS[name].FromString(packed.value)
    except KeyError:
        raise Reason.VERB_UNKNOWN.error(f"{name or 'an empty command'} is no verb of this version") from None
    except DecodeError as error:
        raise Reason.FIELD_INVALID.error(f"{name} cannot be parsed: {error}", field="request") from None


def _too_large(size: int, outcome: Outcome.ValueType) -> RlctlError:
    return Reason.MESSAGE_TOO_LARGE.error(
        f"the answer has {size} bytes; at most {MOST_BYTES} are sent",
        next_step="Ask for less: without the list of tensors.",
        outcome=outcome,
    )


def _reply(link: Link[ControlResponse, ControlRequest], message: ControlResponse) -> None:
    # After a break of the stream, the commander repeats the command over the next stream.
    with contextlib.suppress(RlctlError):
        link.send(message)
