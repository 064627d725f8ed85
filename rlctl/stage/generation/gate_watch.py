"""Checks the gate for all running requests of a stage while their engine sends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import Clock
from rlctl.stage.serving_state import Serving

T = TypeVar("T")

LOOK_S = 0.5
"""How often the stage's state is looked at. It may change on another event loop, which tells nobody here."""


class Ongoing:
    """All of them.

    A timer for each request's gate would be the dearest part of thousands of quiet streams, and a task or a timer for
    each part of an answer that of short ones (docs/benchmarks.md, rollout).
    """

    def __init__(self, serving: Callable[[], Serving], clock: Clock) -> None:
        self._serving = serving
        self._clock = clock
        self._requests: set[OngoingRequest] = set()
        self._looking: asyncio.TimerHandle | None = None

    def begin(self, deadline: float, adapter: str) -> OngoingRequest:
        """One of them, to be ended. ``deadline`` is a time of the clock, in seconds."""
        loop = asyncio.get_running_loop()
        request = OngoingRequest(self._serving, self._clock, deadline, adapter)
        left = deadline - self._clock.now()
        if left != float("inf"):
            request.limit = loop.call_later(max(left, 0.0), request.time_up)
        self._requests.add(request)
        if self._looking is None:
            self._looking = loop.call_later(LOOK_S, self._look)
        return request

    def end(self, request: OngoingRequest) -> None:
        """It has ended, however it did."""
        self._requests.discard(request)
        if request.limit is not None:
            request.limit.cancel()

    def _look(self) -> None:
        serving, now = self._serving(), self._clock.now()
        refusals = {adapter: _refusal(serving, now, adapter) for adapter in {each.adapter for each in self._requests}}
        for request in self._requests:
            refusal = refusals[request.adapter]
            if refusal is not None:
                request.cut(refusal)
        again = asyncio.get_running_loop().call_later
        self._looking = again(LOOK_S, self._look) if self._requests else None


class OngoingRequest:
    """One of them: waits for what the engine says next, no longer than the stage may tell of it.

    Attributes:
        limit: ends it when its time is up.
    """

    def __init__(self, serving: Callable[[], Serving], clock: Clock, deadline: float, adapter: str) -> None:
        self.adapter = adapter
        self.limit: asyncio.TimerHandle | None = None
        self._serving = serving
        self._clock = clock
        self._deadline = deadline
        self._task: asyncio.Task[object] | None = None  # while it waits
        self._cancelled = 0
        self._error: RlctlError | None = None

    async def next(self, parts: AsyncGenerator[T, None]) -> T | None:
        """What the engine says next; None: it has said everything.

        Raises DEADLINE_EXCEEDED, STAGE_NOT_SERVING when nothing more may be told of what is being generated,
        ENGINE_FAILED where the engine gives the request up without a word, and what it fails with.
        """
        if self._clock.now() >= self._deadline:
            raise _late()
        with self:
            part = await anext(parts, None)
        self._serving().refuse_ongoing(self._clock.now(), self.adapter)
        return part

    def time_up(self) -> None:
        """It has taken too long."""
        self.cut(_late())

    def cut(self, error: RlctlError) -> None:
        """If it waits now: its wait is over, and fails with this."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> None:
        """Wait, in the task that runs."""
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelled, self._error = task, task.cancelling(), None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell apart who has cancelled it: the stage, the caller, who goes before, or the engine."""
        task, self._task = self._task, None
        assert task is not None
        cancelled = task.cancelling() if self._error is None else task.uncancel()
        if cancelled > self._cancelled:
            return
        if self._error is not None:
            raise self._error from None
        if kind is asyncio.CancelledError:  # which would end the caller's request as if it had been the caller's wish
            raise Reason.ENGINE_FAILED.error("the engine gave the request up and does not say why") from None


def _refusal(serving: Serving, now: float, adapter: str) -> RlctlError | None:
    try:
        serving.refuse_ongoing(now, adapter)
    except RlctlError as refusal:
        return refusal
    return None


def _late() -> RlctlError:
    return Reason.DEADLINE_EXCEEDED.error("the time was up before the request ended")
