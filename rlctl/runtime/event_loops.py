"""Event loops: uvloop except on Windows, on the main thread or on their own threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, Outcome

T = TypeVar("T")

WAKE_S = 0.5
"""Length of the pieces of a blocking wait. Python handles a signal from just before a wait at the end of the wait."""

CLOSED_AFTER_S = 5.0
"""Least time that a stopped loop is kept open."""

INTERRUPTED_S = 10.0
"""Longest time for interrupted work to end: an abandoned update reports its end to the coordinator."""


def new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform != "win32":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a fresh loop until its end."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


def run_last(main: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine on a fresh loop until its end, and cancel all other tasks. The process must end next.

    Threads of ``asyncio.to_thread`` continue: a runner's close would wait for a stuck thread, with no limit.
    """
    runner = asyncio.Runner(loop_factory=new_loop)
    try:
        runner.run(main)
    finally:
        runner.run(cancel_others())


async def give_way() -> None:
    """Let ready callbacks run, and callbacks that become ready through the first callbacks."""
    for _ in range(2):
        await asyncio.sleep(0)


class LoopThread:
    """A loop on a daemon thread, so that its callbacks never wait for callbacks of another loop."""

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def running(self) -> bool:
        """Return True while the thread runs: the loop was not stopped, and this process is no fork of its owner."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop; from any thread. Raises CANCELLED if the thread has ended."""
        if not self.running:
            work.close()
            raise self._ended()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its end; from any other thread.

        An interrupt cancels the coroutine, and is raised after the coroutine's end or after INTERRUPTED_S. Raises
        CANCELLED if the thread has ended or ends meanwhile. Raises ILLEGAL_STATE on the thread itself, for example in a
        finalizer: the call would wait for ever.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise Reason.ILLEGAL_STATE.error(
                "blocking code was called on the event loop that it would wait for",
                next_step="Use the asyncio SDK there.",
            )
        future = self.submit(work)
        try:
            return self.wait(future)
        except BaseException:
            if not future.done() and future.cancel():
                with contextlib.suppress(RlctlError):  # the thread has ended, and the work with it
                    self.wait(self.submit(_end_of(work)))
            raise

    def wait(self, future: concurrent.futures.Future[T]) -> T:
        """Wait for a future of the loop; from any other thread. Raises CANCELLED if the thread ends first."""
        while True:
            running = self.running
            try:
                return future.result(WAKE_S)
            except concurrent.futures.CancelledError:
                raise self._ended(OUTCOME_UNKNOWN) from None
            except TimeoutError:
                if future.done():  # with its own TimeoutError, or just now
                    return future.result()
                if not running:
                    raise self._ended(OUTCOME_UNKNOWN) from None

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run closing work unless the thread has ended.

        Waits for the work, except on the loop's own thread: the garbage collector may call this on any thread.
        """
        if not self.running:
            work.close()
        elif threading.current_thread() is self._thread:
            self.submit(work)
        else:
            self.call(work)

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and await it from another loop."""
        return await asyncio.wrap_future(self.submit(work))

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the loop; from any thread."""
        self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel all tasks of the loop and end the thread."""
        if not self.running:
            return
        self.call(cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        _close_later(self.loop)

    def _ended(self, outcome: Outcome.ValueType = OUTCOME_REJECTED) -> RlctlError:
        if os.getpid() != self._process:
            why, next_step = (
                "the client belongs to the parent of this forked process",
                "Call in the parent process.",
            )
        else:
            why, next_step = "the client was closed", "Connect again."
        return Reason.CANCELLED.error(why, next_step=next_step, outcome=outcome)


_STOPPED: deque[tuple[float, asyncio.AbstractEventLoop]] = deque()
_CLOSING = threading.Lock()


def _close_later(loop: asyncio.AbstractEventLoop) -> None:
    """Close a stopped loop once no more events can arrive.

    gRPC reports cancelled calls to the loop a moment later, through any running loop. If the loop is closed, gRPC logs
    an error (``PollerCompletionQueue._handle_events``, 1.85).
    """
    now = time.monotonic()
    with _CLOSING:
        _STOPPED.append((now, loop))
        while _STOPPED[0][0] < now - CLOSED_AFTER_S:
            _STOPPED.popleft()[1].close()


async def _end_of(work: Coroutine[Any, Any, Any]) -> None:
    tasks = {task for task in asyncio.all_tasks() if task.get_coro() is work}
    if tasks:
        await asyncio.wait(tasks, timeout=INTERRUPTED_S)


async def cancel_others() -> None:
    """Cancel every other task of the running loop, and wait for all of them."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
