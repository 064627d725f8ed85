"""Event loops: uvloop where there is one, on the main thread or on a thread of their own."""

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
"""A blocking wait is cut into pieces of so long: Python acts on a signal that came just before a wait at its end."""

CLOSED_AFTER_S = 5.0
"""How long a loop that was stopped is kept, at least."""

INTERRUPTED_S = 10.0
"""How long what was interrupted may take to end: an update that is given up tells the coordinator so."""


def new_loop() -> asyncio.AbstractEventLoop:
    """A fresh event loop."""
    if sys.platform != "win32":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a fresh loop until it ends."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


async def give_way() -> None:
    """Let what is ready run, and what is ready through that."""
    for _ in range(2):
        await asyncio.sleep(0)


class LoopThread:
    """A loop that runs on a daemon thread, so that its callbacks never wait for those of another loop."""

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
        """Whether there is still somebody to run anything: it was not stopped, and this is no child of a fork."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine there; from any thread. Raises CANCELLED where the thread has ended."""
        if not self.running:
            work.close()
            raise self._ended()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; from any other thread. An interrupt cancels it, and is raised when it
        has ended, or when it takes long to end. Raises CANCELLED where the thread has ended, or ends meanwhile;
        ILLEGAL_STATE on the thread itself, where a finalizer may come to run: it would wait for ever.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise Reason.ILLEGAL_STATE.error("blocking code was called on the event loop that it would wait for")
        future = self.submit(work)
        try:
            return self.wait(future)
        except BaseException:
            if not future.done() and future.cancel():
                with contextlib.suppress(RlctlError):  # the thread has ended, and the work with it
                    self.wait(self.submit(_end_of(work)))
            raise

    def wait(self, future: concurrent.futures.Future[T]) -> T:
        """Wait for what ends there; from any other thread. Raises CANCELLED where the thread ends before it."""
        while True:
            running = self.running
            try:
                return future.result(WAKE_S)
            except concurrent.futures.CancelledError:
                raise self._ended(OUTCOME_UNKNOWN) from None
            except TimeoutError:
                if future.done():  # with an error of its own, or just now
                    return future.result()
                if not running:
                    raise self._ended(OUTCOME_UNKNOWN) from None

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what ends something, as far as there is anything left to end. Waits for it, but on the loop's own thread:
        what nobody refers to any more is collected on whichever thread comes by.
        """
        if not self.running:
            work.close()
        elif threading.current_thread() is self._thread:
            self.submit(work)
        else:
            self.call(work)

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and await it from another loop."""
        return await asyncio.wrap_future(self.submit(work))

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function there; from any thread."""
        self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel what runs there and end the thread."""
        if not self.running:
            return
        self.call(cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        _close_later(self.loop)

    def _ended(self, outcome: Outcome.ValueType = OUTCOME_REJECTED) -> RlctlError:
        if os.getpid() != self._process:
            why, next_step = "it belongs to the process that this one was forked from", "Ask there."
        else:
            why, next_step = "it was closed", "Connect anew."
        return Reason.CANCELLED.error(why, next_step=next_step, outcome=outcome)


_STOPPED: deque[tuple[float, asyncio.AbstractEventLoop]] = deque()
_CLOSING = threading.Lock()


def _close_later(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop that was stopped when nothing comes to it any more.

    gRPC tells it of calls that were cancelled a moment later, by way of any loop that runs, and logs an error where it
    is closed (``PollerCompletionQueue._handle_events``, 1.85).
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
    """Cancel every other task of the running loop, and wait for their ends."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
