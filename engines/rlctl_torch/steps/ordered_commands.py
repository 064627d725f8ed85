"""Ordered commands on their way through a rank: registered by the admin loop, ordered by rank 0, carried out by the
engine thread at the step that the plan says.

A command is first *admitted* at rank 0: it may go at once, wait for something (running requests to finish), or be
refused. The refusal travels in the plan, so that all ranks refuse together and none changes anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, Outcome
from rlctl_torch.steps.background import Later
from rlctl_torch.steps.step_plan import Order

T = TypeVar("T")

ARRIVAL_S = 10.0
"""How long a rank waits for a command that rank 0 has ordered: the stage orders only what every rank has accepted."""

ANSWER_S = 0.2
"""Kept back of a command's time, so that a refusal for lack of time reaches its caller in time."""


class Action(Protocol):
    """What a verb does, apart from how the command gets here."""

    def admit(self) -> bool:
        """Rank 0, before the step: True to go ahead, False to be asked again soon. Raises to refuse."""

    def give_up(self) -> None:
        """Rank 0: undo what :meth:`admit` began; the command will not be carried out."""

    def run(self) -> Message | Later | None:
        """Every rank, at the step. Returns the verb's data, or work that will; raises RlctlError with the outcome it
        left.
        """


class Command:
    """A registered command.

    Attributes:
        action: what it does.
        deadline: on :func:`time.monotonic`'s clock.
        step: at which this rank carried it out; 0 before.
        in_stream: rank 0 has put it into the step stream.
    """

    def __init__(self, action: Action, deadline: float) -> None:
        self.action = action
        self.deadline = deadline
        self.step = 0
        self.in_stream = False
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Message | None] = self._loop.create_future()
        self.ordered: asyncio.Future[int] | None = None

    def settle(self, value: Message | None, error: RlctlError | None = None) -> None:
        """Answer the method that waits; from any thread."""
        _settle(self._loop, self.result, value, error)

    def settle_order(self, step: int, error: RlctlError | None = None) -> None:
        """Answer whoever ordered it; from any thread."""
        if self.ordered is not None:
            _settle(self._loop, self.ordered, step, error)


class CommandStream:
    """The registered commands of one rank, and at rank 0 the queue of ordered ones."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._registered: dict[str, Command] = {}
        self._queue: deque[str] = deque()
        self._failure: RlctlError | None = None

    # On the admin loop.

    async def carry_out(self, action: Action, call: Call) -> Message | None:
        """Register, accept, wait. Raises what the action raises; CANCELLED, without effect, when it is withdrawn."""
        remaining = call.deadline - asyncio.get_running_loop().time()
        command = Command(action, time.monotonic() + remaining)
        with self._changed:
            if self._failure is not None:
                raise rejected(self._failure)
            if call.command_id in self._registered:
                raise Reason.REQUEST_ID_REUSED.error(f"command {call.command_id} is registered already")
            self._registered[call.command_id] = command
            self._changed.notify_all()
        call.accept()
        try:
            return await command.result
        finally:
            self.withdraw(call.command_id)
            call.step = command.step

    async def order(self, command_id: str) -> int:
        """Rank 0: put a registered command into the stream; returns its step once it is there.

        Raises CANCELLED when the command is not registered or is withdrawn meanwhile.
        """
        with self._changed:
            command = self._registered.get(command_id)
            if self._failure is not None:
                raise rejected(self._failure)
            if command is None or command.ordered is not None:
                raise Reason.CANCELLED.error(f"command {command_id} is not there to be ordered")
            command.ordered = asyncio.get_running_loop().create_future()
            self._queue.append(command_id)
        self._wake()
        return await command.ordered

    def withdraw(self, command_id: str) -> None:
        """Forget a command that is not in the stream yet; its method raises CANCELLED. Otherwise nothing happens."""
        with self._changed:
            command = self._registered.get(command_id)
            if command is None or command.in_stream:
                return
            del self._registered[command_id]
            if command_id in self._queue:
                self._queue.remove(command_id)
                command.action.give_up()
        withdrawn = Reason.CANCELLED.error("the command was withdrawn before it was carried out")
        command.settle(None, withdrawn)
        command.settle_order(0, withdrawn)

    # On the engine thread.

    @property
    def waiting(self) -> bool:
        """Rank 0: whether an ordered command is not in the stream yet."""
        return bool(self._queue)

    def next_order(self) -> Order | None:
        """Rank 0: the next command that goes into the stream, if its turn has come: to be carried out or refused."""
        with self._changed:
            if not self._queue:
                return None
            command_id = self._queue[0]
            command = self._registered[command_id]
            refusal: RlctlError | None = None
            try:
                if time.monotonic() >= command.deadline - ANSWER_S:
                    raise Reason.DEADLINE_EXCEEDED.error("the time was up before the command could be carried out")
                if not command.action.admit():
                    return None
            except RlctlError as error:
                refusal = error
                command.action.give_up()
            self._queue.popleft()
            command.in_stream = True
            return Order(command_id, refusal)

    def take(self, command_id: str, step: int) -> Command:
        """The command that the stream has reached; a follower whose command has not arrived waits for it.

        Raises ENGINE_FAILED when it does not come: the ranks would no longer do the same.
        """
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._failure or command_id in self._registered, ARRIVAL_S)
            if not arrived or command_id not in self._registered:
                raise Reason.ENGINE_FAILED.error(
                    f"command {command_id} was ordered for step {step} but never came to this rank"
                )
            command = self._registered.pop(command_id)
            command.in_stream = True
        command.step = step
        command.settle_order(step)
        return command

    def fail(self, error: RlctlError) -> None:
        """Answer everything with an error, now and from now on; what is in the stream has an unknown outcome."""
        with self._changed:
            self._failure = error
            commands, self._registered = list(self._registered.values()), {}
            self._queue.clear()
            self._changed.notify_all()
        for command in commands:
            answer = unknown(error) if command.in_stream else rejected(error)
            command.settle(None, answer)
            command.settle_order(0, answer)


def rejected(error: RlctlError) -> RlctlError:
    """The same error, for a command that it keeps from having any effect."""
    return with_outcome(error, OUTCOME_REJECTED)


def unknown(error: RlctlError) -> RlctlError:
    """The same error, for a command that may or may not have had its effect."""
    return with_outcome(error, OUTCOME_UNKNOWN)


def with_outcome(error: RlctlError, outcome: Outcome.ValueType) -> RlctlError:
    """The same error with another outcome."""
    return error.reason.error(
        error.message, field=error.field, next_step=error.next_step, metadata=error.metadata, outcome=outcome
    )


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], value: T, error: RlctlError | None) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)
            future.exception()  # retrieved: whoever waited may have given up

    # A loop that was closed has nobody left who waits.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)
