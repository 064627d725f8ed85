"""Requests that have not ended, and how each kind is ended."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl_servers.requests.passed_bodies import Reading

T = TypeVar("T")

ABORT_S = 2.0
"""Seconds that an aborted request waits for its end from the server. A request held back by a pause gets no end."""

HELD_S = 0.05
"""Interval in seconds at which a request checks whether its output is still held back."""


class RunningRequest(abc.ABC):
    """A request that has not ended.

    Attributes:
        engine_rids: ids of its samples at the server.
        adapter: name of its adapter, or "".
        prepared: see :meth:`rlctl_servers.requests.requests.Dialect.prepares`.
        samples: number of samples that the server generates.
        sent: the request is on its way to the server.
    """

    def __init__(self, engine_rids: Sequence[str], adapter: str, *, prepared: bool, samples: int) -> None:
        self.engine_rids = engine_rids
        self.adapter = adapter
        self.prepared = prepared
        self.samples = samples
        self.sent = False
        self._loop = asyncio.get_running_loop()

    @abc.abstractmethod
    def heard(self, engine_rid: str) -> bool:
        """Return whether output of a sample has arrived."""

    @property
    @abc.abstractmethod
    def not_heard(self) -> Sequence[str]:
        """Return the ids of the samples without output."""

    @abc.abstractmethod
    def cut_off(self) -> None:
        """Let the request end soon, if necessary without an answer of the server. Runs on the loop of the request."""

    @abc.abstractmethod
    async def leave_silent(self) -> None:
        """Close the connections of samples without output. Runs on the loop of the request."""

    @property
    def leaves(self) -> bool:
        """Return whether only closing the connection ends the request: the server would answer an abort wrongly."""
        return False

    def end(self) -> None:
        """End the request soon, from any thread."""
        self._loop.call_soon_threadsafe(self.cut_off)

    async def leave(self) -> None:
        """Run :meth:`leave_silent` on the loop of the request, from any loop."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.leave_silent(), self._loop))


class SampledRequest(RunningRequest):
    """A request that rlctl sends as one stream for each sample.

    Attributes:
        silent: tasks of the samples without output, by number.
        cut: set when the request is to end.
        heard_of: ids of the samples with output.
    """

    def __init__(self, engine_rids: Sequence[str], adapter: str, *, prepared: bool) -> None:
        super().__init__(engine_rids, adapter, prepared=prepared, samples=len(engine_rids))
        self.heard_of: set[str] = set()
        self.silent: dict[int, asyncio.Task[None]] = {}
        self.cut = asyncio.Event()

    def heard(self, engine_rid: str) -> bool:
        return engine_rid in self.heard_of

    @property
    def not_heard(self) -> Sequence[str]:
        return [rid for index, rid in enumerate(self.engine_rids) if not self.sent or index in self.silent]

    def cut_off(self) -> None:
        self.cut.set()

    async def leave_silent(self) -> None:
        tasks = list(self.silent.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PassedRequest(RunningRequest):
    """A request that is passed on as it came, over one connection.

    Attributes:
        begun: a piece of the server's answer has arrived. A server may send the head of a stream before it has prepared
            the request.
        is_cut: the request is to end.
    """

    def __init__(self, reading: Reading, is_held: Callable[[], bool]) -> None:
        """``is_held``: the output of the server is held back."""
        super().__init__(reading.engine_rids, reading.adapter, prepared=reading.prepared, samples=reading.samples)
        self.begun = False
        self.is_cut = False
        self._is_left = False
        self._is_held = is_held
        self._waiting: asyncio.Timeout | None = None
        self._until: float | None = None
        self._over = asyncio.Event()

    def heard(self, engine_rid: str) -> bool:  # noqa: ARG002
        return self.begun

    @property
    def not_heard(self) -> Sequence[str]:
        return () if self.begun else self.engine_rids

    @property
    def leaves(self) -> bool:
        return self.prepared and not self.begun

    def cut_off(self) -> None:
        self.is_cut = True
        self._end_wait(0.0 if self.leaves else ABORT_S)

    async def leave_silent(self) -> None:
        if not self.begun:
            self._is_left = True
            self._end_wait(0.0)
            await self._over.wait()

    def over(self) -> None:
        """Record that the connection to the server is closed."""
        self._over.set()

    def _end_wait(self, within_s: float) -> None:
        self._until = asyncio.get_running_loop().time() + within_s
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(self._until)

    async def next(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the next part of the answer, once no output is held back. An empty part is no output.

        Raises CANCELLED after an abort, STAGE_NOT_SERVING before a pause.
        """
        try:
            async with asyncio.timeout_at(self._until) as self._waiting:
                part = await read()
        except TimeoutError:
            if self._is_left and not self.is_cut:
                raise Reason.STAGE_NOT_SERVING.error("the server is about to be paused") from None
            raise aborted() from None
        finally:
            self._waiting = None
        self.begun = self.begun or bool(part)
        while self._is_held():
            if self.is_cut:
                raise aborted()
            await asyncio.sleep(HELD_S)
        return part


def aborted() -> RlctlError:
    """Return the error of an aborted request that the server has not answered."""
    error = Reason.CANCELLED.error("the request was aborted before the server had answered it")
    error.http_status = 400  # OpenAI's client repeats a 409
    return error
