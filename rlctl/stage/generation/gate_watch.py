"""Checks the gate for all running requests of a stage while the engine is silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import Clock
from rlctl.stage.serving_state import Serving

T = TypeVar("T")

LOOK_S = 0.5
"""Seconds between reads of the stage's state. The state changes on a different event loop without notice."""


class Ongoing:
    """The running requests of a stage, with a common timer for the gate.

    A timer for each request's gate would dominate the cost of thousands of quiet streams. A task or a timer for each
    part of an answer would dominate the cost of short streams (docs/benchmarks.md, rollout).
    """

    def __init__(self, serving: Callable[[], Serving], clock: Clock) -> None:
        self._serving = serving
        self._clock = clock
        self._requests: set[OngoingRequest] = set()
        self._looking: asyncio.TimerHandle | None = None

    def begin(self, deadline: float, adapter: str) -> OngoingRequest:
        """Register a request; the caller must call :meth:`end`. ``deadline`` is a time of the clock, in seconds."""
        loop = asyncio.get_running_loop()
        request = OngoingRequest(self._serving, self._clock, deadline, adapter)
        remaining = deadline - self._clock.now()
        if remaining != float("inf"):
            request.limit = loop.call_later(max(remaining, 0.0), request.time_up)
        self._requests.add(request)
        if self._looking is None:
            self._looking = loop.call_later(LOOK_S, self._look)
        return request

    def end(self, request: OngoingRequest) -> None:
        self._requests.discard(request)
        if request.limit is not None:
            request.limit.cancel()

    def cut(self, error: RlctlError) -> None:
        """End the present waits of all requests with an error."""
        for request in self._requests:
            request.cut(error)

    def _look(self) -> None:
        serving = self._serving()
        refusals = {
            adapter: _refusal(serving, self._clock, adapter) for adapter in {each.adapter for each in self._requests}
        }
        now = self._clock.now()
        for request in self._requests:
            refusal = refusals[request.adapter]
            if refusal is not None:
                request.cut(refusal)
            elif now >= request.deadline:  # its timer met a wait that was being cancelled by a timeout of the engine
                request.time_up()
        again = asyncio.get_running_loop().call_later
        self._looking = again(LOOK_S, self._look) if self._requests else None


class OngoingRequest:
    """A running request. Waits for the next part of the engine only while the stage may send it.

    Attributes:
        deadline: time of the clock, in seconds.
        limit: timer that ends the request at its deadline.
    """

    def __init__(self, serving: Callable[[], Serving], clock: Clock, deadline: float, adapter: str) -> None:
        self.adapter = adapter
        self.limit: asyncio.TimerHandle | None = None
        self._serving = serving
        self._clock = clock
        self.deadline = deadline
        self._task: asyncio.Task[object] | None = None  # while the request waits
        self._cancelled = 0
        self._error: RlctlError | None = None

    async def next(self, parts: AsyncGenerator[T, None]) -> T | None:
        """Return the next part of the engine's answer, or None at its end. Raises as :meth:`within`."""
        return await self.within(lambda: anext(parts, None))

    async def within(self, read: Callable[[], Awaitable[T]]) -> T:
        """Read a part of the engine's answer, and return it if the stage may send it.

        Raises DEADLINE_EXCEEDED; STAGE_NOT_SERVING if no further tokens may be sent; ENGINE_FAILED if the engine
        cancels the request without an error; and the engine's own error.
        """
        if self._clock.now() >= self.deadline:
            raise _late()
        with self:
            part = await read()
        self._serving().refuse_ongoing(self._clock, self.adapter)
        return part

    def time_up(self) -> None:
        self.cut(_late())

    def cut(self, error: RlctlError) -> None:
        """End the present wait of the request, if any, with an error.

        A wait that its caller has cancelled is not cancelled again: this would interrupt the abort at the engine.
        """
        if self._task is not None and self._error is None and self._task.cancelling() <= self._cancelled:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> None:
        """Begin a wait in the current task."""
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelled, self._error = task, task.cancelling(), None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Distinguish cancellation by the stage, the caller and the engine. The caller takes precedence."""
        task, self._task = self._task, None
        assert task is not None
        cancelled = task.cancelling() if self._error is None else task.uncancel()
        if cancelled > self._cancelled:
            return
        if self._error is not None:
            raise self._error from None
        if kind is asyncio.CancelledError:  # would look like a cancellation by the caller
            raise Reason.ENGINE_FAILED.error("the engine dropped the request without a reason") from None


def _refusal(serving: Serving, clock: Clock, adapter: str) -> RlctlError | None:
    try:
        serving.refuse_ongoing(clock, adapter)
    except RlctlError as refusal:
        return refusal
    return None


def _late() -> RlctlError:
    return Reason.DEADLINE_EXCEEDED.error("the time was up before the request ended")
