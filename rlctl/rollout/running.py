"""Requests under way, which their callers may stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from rlctl.contract.errors import RlctlError
from rlctl.rollout.stage_stream import Line

STOP_S = 2.0
"""Time for a stopped request to end at its engine, which then returns the rest of its tokens."""

OVERTAKEN_S = 0.02
"""Pause before an abort is repeated. An abort may reach the engine before its request."""

T = TypeVar("T")

Metadata = tuple[tuple[str, str], ...]


class Running:
    """A request under way.

    Attributes:
        metadata: of its calls.
        running: line and id of the request that runs now.
        stopped: its caller has stopped it.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.running: tuple[Line, str] | None = None
        self.stopped = False
        self._waiting: asyncio.Timeout | None = None

    async def wait(self, work: Awaitable[T]) -> T | None:
        """The result of the work; None if the request is stopped meanwhile."""
        try:
            async with asyncio.timeout(0 if self.stopped else None) as self._waiting:
                return await work
        except TimeoutError:
            if not self.stopped:
                raise
            return None
        finally:
            self._waiting = None

    def stop(self) -> Coroutine[Any, Any, None] | None:
        """Stop it. If a stage has it, the returned call ends it there; it raises RlctlError."""
        self.stopped = True
        if self.running is not None:
            return self._abort(*self.running)
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())
        return None

    async def _abort(self, line: Line, rid: str) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + STOP_S
        while not await line.abort(rid, self.metadata, STOP_S):
            await asyncio.sleep(OVERTAKEN_S)
            if self.running != (line, rid) or loop.time() >= until:
                return


async def stop(requests: Iterable[Running]) -> None:
    """End requests at their engines. A stage that is gone has nothing to end."""
    aborts = [abort for request in requests if (abort := request.stop()) is not None]
    for ended in await asyncio.gather(*aborts, return_exceptions=True):
        if isinstance(ended, BaseException) and not isinstance(ended, RlctlError):
            raise ended
