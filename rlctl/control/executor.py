"""The commanded half of a command stream: carries out each command at most once and remembers what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from google.protobuf import symbol_database
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message

from rlctl.engine import Call
from rlctl.errors import Reason, RlctlError
from rlctl.ports import Clock, Link
from rlctl.times import seconds
from rlctl.v1 import verbs_pb2
from rlctl.v1.control_pb2 import (
    Attach,
    Attached,
    CommandAccepted,
    CommandResult,
    ControlRequest,
    ControlResponse,
    Pong,
    ServingGrant,
)

REMEMBERED = 4096
"""Ended commands whose results are kept for repeats."""

_TYPES = symbol_database.Default()


class Commanded(Protocol):
    """What stands behind an executor: a stage, or a follower rank's worker."""

    async def attach(self, attach: Attach, link: Link[ControlResponse, ControlRequest]) -> Attached:
        """Accept or refuse a commander; reports go to the accepted one's link from then on."""

    def grant(self, grant: ServingGrant) -> None:
        """Take a serving grant."""

    async def carry_out(self, request: Message, call: Call) -> CommandResult:
        """Do it. Never raises: what went wrong stands in the result."""

    def refuse(self, error: RlctlError) -> CommandResult:
        """A result for a command that was refused before it was looked at."""

    async def withdraw(self, command_id: str) -> None:
        """Give up a command that has not been started."""


class _Accepted:
    """Tells those who want to know, once, that a command was accepted."""

    def __init__(self) -> None:
        self.watchers: list[Callable[[], None]] = []
        self._told = False

    def tell(self) -> None:
        self._told = True
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            watcher()

    @contextlib.contextmanager
    def watched(self, watcher: Callable[[], None]) -> Iterator[None]:
        if self._told:
            watcher()
        else:
            self.watchers.append(watcher)
        try:
            yield
        finally:
            if watcher in self.watchers:
                self.watchers.remove(watcher)


@dataclass
class _Record:
    digest: bytes
    task: asyncio.Task[CommandResult]
    accepted: _Accepted


class Executor:
    """Carries out commands for a :class:`Commanded`, whether they come by stream or by unary call."""

    def __init__(self, commanded: Commanded, clock: Clock) -> None:
        self._commanded = commanded
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()

    async def execute(
        self,
        command_id: str,
        request: Any,
        remaining_s: float,
        on_accepted: Callable[[], None] = lambda: None,
        *,
        together: bool = False,
    ) -> CommandResult:
        """Carry a command out, or attach to the run with the same id, or return its recorded result.

        The run goes on when the caller is cancelled. The same id with another body is refused.
        """
        digest = hashlib.sha256(request.type_url.encode() + b"\0" + request.value).digest()
        record = self._records.get(command_id)
        if record is None:
            accepted = _Accepted()
            deadline = self._clock.now() + remaining_s
            call = Call(command_id=command_id, deadline=deadline, accept=accepted.tell, together=together)
            record = _Record(digest, asyncio.create_task(self._run(request, call)), accepted)
            self._records[command_id] = record
            self._forget()
        elif record.digest != digest:
            return self._commanded.refuse(Reason.REQUEST_ID_REUSED.error(f"command {command_id} had another body"))
        with record.accepted.watched(on_accepted):
            return await asyncio.shield(record.task)

    async def serve(self, link: Link[ControlResponse, ControlRequest]) -> None:
        """Obey one stream until it ends. Commands that are running then go on, and their results are kept."""
        tasks: set[asyncio.Task[None]] = set()
        async for message in link.receive():
            match message.WhichOneof("message"):
                case "attach":
                    attached = await self._commanded.attach(message.attach, link)
                    _reply(link, ControlResponse(attached=attached, sent_at=self._now()))
                case "command":
                    task = asyncio.create_task(self._answer(link, message))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                case "cancel":
                    task = asyncio.create_task(self._commanded.withdraw(message.cancel.command_id))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                case "grant":
                    self._commanded.grant(message.grant)
                case "ping":
                    _reply(link, ControlResponse(pong=Pong(nonce=message.ping.nonce), sent_at=self._now()))

    def _now(self) -> int:
        return max(1, int(self._clock.now() * 1e6))

    async def _answer(self, link: Link[ControlResponse, ControlRequest], message: ControlRequest) -> None:
        command = message.command
        remaining = seconds(command.time_remaining)
        accepted = ControlResponse(accepted=CommandAccepted(command_id=command.command_id))
        result = await self.execute(
            command.command_id, command.request, remaining, lambda: _reply(link, accepted), together=True
        )
        answer = ControlResponse(result=result)
        answer.result.command_id = command.command_id
        _reply(link, answer)

    async def _run(self, packed: Any, call: Call) -> CommandResult:
        try:
            request = unpack(packed)
        except RlctlError as error:
            return self._commanded.refuse(error)
        return await self._commanded.carry_out(request, call)

    def _forget(self) -> None:
        for command_id in list(self._records):
            if len(self._records) <= REMEMBERED:
                return
            if self._records[command_id].task.done():
                del self._records[command_id]


def unpack(packed: Any) -> Message:
    """The verb request inside a command. Raises VERB_UNKNOWN, or FIELD_INVALID when it cannot be parsed."""
    name = packed.TypeName()
    package = verbs_pb2.DESCRIPTOR.package
    try:
        if name.rpartition(".")[0] != package:
            raise KeyError(name)
        request: Message = _TYPES.GetSymbol(name)()
        request.ParseFromString(packed.value)
    except KeyError:
        raise Reason.VERB_UNKNOWN.error(f"{name or 'an empty command'} is no verb of this version") from None
    except DecodeError as error:
        raise Reason.FIELD_INVALID.error(f"{name} cannot be parsed: {error}", field="request") from None
    return request


def _reply(link: Link[ControlResponse, ControlRequest], message: ControlResponse) -> None:
    # A stream that broke in between: the commander asks again over the next one.
    with contextlib.suppress(RlctlError):
        link.send(message)
