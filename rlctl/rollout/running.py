"""Requests under way, with a way to stop them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from rlctl.contract.errors import RlctlError
from rlctl.rollout.stage_stream import Line

STOP_S = 2.0
"""Seconds for a stopped request to end at its engine. The engine then returns the remaining tokens."""

OVERTAKEN_S = 0.02
"""Seconds between repeated aborts. An abort may reach the engine before its request."""

T = TypeVar("T")

Metadata = tuple[tuple[str, str], ...]


class Running:
    """A request under way.

    Attributes:
        metadata: gRPC metadata of the calls.
        running: line and id of the present request.
        stopped: the caller has stopped the request.
    """

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = metadata
        self.running: tuple[Line, str] | None = None
        self.stopped = False
        self._waiting: asyncio.Timeout | None = None

    async def wait(self, work: Awaitable[T]) -> T | None:
        """Return the result of ``work``, or None if the request is stopped meanwhile."""
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
        """Stop the request. If a stage has the request, return a coroutine that aborts it there.

        The coroutine raises RlctlError.
        """
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
    """Stop requests at their engines. Errors of stages are ignored: a lost stage has nothing to end."""
    aborts = [abort for request in requests if (abort := request.stop()) is not None]
    for ended in await asyncio.gather(*aborts, return_exceptions=True):
        if isinstance(ended, BaseException) and not isinstance(ended, RlctlError):
            raise ended
