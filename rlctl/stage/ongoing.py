"""The requests under way at a stage: one look at the gate for all of them while their engine says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rlctl.errors import Reason, RlctlError
from rlctl.ports import Clock
from rlctl.stage.core import Serving

LOOK_S = 0.5
"""How often the stage's state is looked at. It may change on another event loop, which tells nobody here."""


class Ongoing:
    """Waits for what an engine says next, no longer than the stage may tell of it.

    A timer for each request would be the dearest part of thousands of quiet streams (docs/benchmarks.md, rollout).
    """

    def __init__(self, serving: Callable[[], Serving], clock: Clock) -> None:
        self._serving = serving
        self._clock = clock
        self._waiting: dict[asyncio.Future[None], str] = {}
        self._looking: asyncio.TimerHandle | None = None

    async def wait(self, coming: asyncio.Future[Any], deadline: float, adapter: str) -> None:
        """Returns when ``coming`` is done. ``deadline`` is a time of the clock, in seconds.

        Raises DEADLINE_EXCEEDED, or STAGE_NOT_SERVING when nothing more may be told of what is being generated.
        """
        while True:
            left = deadline - self._clock.now()
            if left <= 0:
                raise Reason.DEADLINE_EXCEEDED.error("the time was up before the request ended")
            await self._sleep(coming, left, adapter)
            self._serving().refuse_ongoing(self._clock.now(), adapter)
            if coming.done():
                return

    async def _sleep(self, coming: asyncio.Future[Any], left: float, adapter: str) -> None:
        """Until ``coming`` is done, the time is up or a look has found the gate shut."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake(_coming: object = None) -> None:
            if not woken.done():
                woken.set_result(None)

        coming.add_done_callback(wake)
        limit = loop.call_later(left, wake) if left != float("inf") else None
        self._waiting[woken] = adapter
        if self._looking is None:
            self._looking = loop.call_later(LOOK_S, self._look)
        try:
            await woken
        finally:
            del self._waiting[woken]
            if limit is not None:
                limit.cancel()
            coming.remove_done_callback(wake)

    def _look(self) -> None:
        serving, now = self._serving(), self._clock.now()
        refused = {adapter for adapter in set(self._waiting.values()) if _is_refused(serving, now, adapter)}
        for woken, adapter in self._waiting.items():
            if adapter in refused and not woken.done():
                woken.set_result(None)
        again = asyncio.get_running_loop().call_later
        self._looking = again(LOOK_S, self._look) if self._waiting else None


def _is_refused(serving: Serving, now: float, adapter: str) -> bool:
    try:
        serving.refuse_ongoing(now, adapter)
    except RlctlError:
        return True
    return False
