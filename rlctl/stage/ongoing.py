"""The requests under way at a stage: one look at the gate for all of them while their engine says nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from rlctl.errors import Reason, RlctlError
from rlctl.ports import Clock
from rlctl.stage.core import Serving

T = TypeVar("T")

LOOK_S = 0.5
"""How often the stage's state is looked at. It may change on another event loop, which tells nobody here."""


class Ongoing:
    """Waits for what an engine says next, no longer than the stage may tell of it.

    A timer for each request would be the dearest part of thousands of quiet streams, and a task for each part of an
    answer that of short ones (docs/benchmarks.md, rollout): whoever waits is cancelled when the wait is over.
    """

    def __init__(self, serving: Callable[[], Serving], clock: Clock) -> None:
        self._serving = serving
        self._clock = clock
        self._waiting: set[_Wait] = set()
        self._looking: asyncio.TimerHandle | None = None

    async def next(self, parts: AsyncGenerator[T, None], deadline: float, adapter: str) -> T | None:
        """What an engine says next; None: it has said everything. ``deadline`` is a time of the clock, in seconds.

        Raises DEADLINE_EXCEEDED, STAGE_NOT_SERVING when nothing more may be told of what is being generated,
        ENGINE_FAILED where the engine gives the request up without a word, and what it fails with.
        """
        left = deadline - self._clock.now()
        if left <= 0:
            raise _late()
        loop = asyncio.get_running_loop()
        wait = _Wait(adapter)
        limit = None if left == float("inf") else loop.call_later(left, lambda: wait.cut(_late()))
        self._waiting.add(wait)
        if self._looking is None:
            self._looking = loop.call_later(LOOK_S, self._look)
        part: T | None = None
        try:
            with wait, contextlib.suppress(StopAsyncIteration):
                part = await anext(parts)
        finally:
            self._waiting.discard(wait)
            if limit is not None:
                limit.cancel()
        self._serving().refuse_ongoing(self._clock.now(), adapter)
        return part

    def _look(self) -> None:
        serving, now = self._serving(), self._clock.now()
        refusals = {adapter: _refusal(serving, now, adapter) for adapter in {wait.adapter for wait in self._waiting}}
        for wait in self._waiting:
            refusal = refusals[wait.adapter]
            if refusal is not None:
                wait.cut(refusal)
        again = asyncio.get_running_loop().call_later
        self._looking = again(LOOK_S, self._look) if self._waiting else None


class _Wait:
    """One of them: what is awaited inside of it, by the task that makes it."""

    def __init__(self, adapter: str) -> None:
        self.adapter = adapter
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelled = task.cancelling()
        self._error: RlctlError | None = None

    def cut(self, error: RlctlError) -> None:
        """It is over, and fails with this."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> None:
        """Wait."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell apart who has cancelled it: the stage, the caller, who goes before, or the engine."""
        cancelled = self._task.cancelling() if self._error is None else self._task.uncancel()
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
