"""Ordered commands at a rank: registered by the admin loop, ordered by rank 0, carried out by the engine thread.

Rank 0 first *admits* a command: the command runs at once, waits for a condition (the end of running requests), or is
refused. The refusal travels in the plan, so that all ranks refuse together and no rank changes anything.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, Outcome
from rlctl_torch.steps.background import Later
from rlctl_torch.steps.step_plan import Order

T = TypeVar("T")

ARRIVAL_S = 10.0
"""Seconds that a rank waits for a command ordered by rank 0. The stage orders only commands accepted by every rank."""

ANSWER_S = 0.2
"""Seconds kept back of a command's time, so that a refusal for lack of time reaches its caller in time."""


class Action(abc.ABC):
    """The effect of a verb, independent of the transport of its command."""

    def admit(self) -> bool:
        """Return True to run, or False to be asked again soon; raise to refuse. Rank 0 only, before the step."""
        return True

    def give_up(self) -> None:  # noqa: B027 (most admissions change nothing)
        """Undo :meth:`admit`, because the command will not run; rank 0 only."""

    @abc.abstractmethod
    def run(self) -> Message | Later | None:
        """Carry out the verb on every rank, at the step. Return the verb's data or background work.

        Raises RlctlError with the outcome of the command.
        """


class Command:
    """A registered command.

    Attributes:
        deadline: on :func:`time.monotonic`'s clock.
        step: step at which this rank carried out the command; 0 before.
        in_stream: rank 0 has put the command into the step stream.
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
        """Complete the wait for the result; from any thread."""
        _settle(self._loop, self.result, value, error)

    def settle_order(self, step: int, error: RlctlError | None = None) -> None:
        """Complete the wait for the order; from any thread."""
        if self.ordered is not None:
            _settle(self._loop, self.ordered, step, error)


class CommandStream:
    """Registered commands of a rank, and at rank 0 the queue of ordered commands."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._registered: dict[str, Command] = {}
        self._queue: deque[str] = deque()  # registered commands, each of a caller that waits
        self._failure: RlctlError | None = None

    # On the admin loop.

    async def carry_out(self, action: Action, call: Call) -> Message | None:
        """Register and accept a command, and wait for its result.

        Raises the error of the action; CANCELLED, without effect, if the command is withdrawn.
        """
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
        """Put a registered command into the stream, and return its step; rank 0 only.

        Raises CANCELLED if the command is not registered, is already ordered, or is withdrawn meanwhile.
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
        """Forget a command that is not in the stream yet; :meth:`carry_out` raises CANCELLED. Otherwise do nothing."""
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
        """Whether an ordered command is not in the stream yet; rank 0 only."""
        return bool(self._queue)

    def next_order(self) -> Order | None:
        """Return the next command for the stream, to run or to be refused, or None if that command must wait; rank 0
        only.
        """
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
        """Return the command that the stream has reached. A follower waits for a command that has not arrived.

        Raises ENGINE_FAILED if the command does not arrive, because the ranks would no longer do the same.
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
        """Answer all commands with an error, now and later. Commands in the stream have an unknown outcome."""
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
    """Return the same error with outcome REJECTED: the command has had no effect."""
    return with_outcome(error, OUTCOME_REJECTED)


def unknown(error: RlctlError) -> RlctlError:
    """Return the same error with outcome UNKNOWN: the command may have had its effect."""
    return with_outcome(error, OUTCOME_UNKNOWN)


def with_outcome(error: RlctlError, outcome: Outcome.ValueType) -> RlctlError:
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
            future.exception()  # retrieved, because the caller may have given up

    # A closed loop has no waiting caller.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)
