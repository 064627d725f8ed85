"""Event loops: uvloop where there is one, on the main thread or on a thread of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

WAKE_S = 0.5
"""A blocking wait is cut into pieces of so long: Python acts on a signal that came just before a wait at its end."""


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


class LoopThread:
    """A loop that runs on a daemon thread, so that its callbacks never wait for those of another loop."""

    def __init__(self, name: str) -> None:
        self.loop = new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine there; from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it; from any other thread. An interrupt cancels it."""
        future = self.submit(work)
        try:
            while True:
                try:
                    return future.result(WAKE_S)
                except TimeoutError:
                    if future.done():  # with an error of its own, or just now
                        return future.result()
        except BaseException:
            future.cancel()
            raise

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and await it from another loop."""
        return await asyncio.wrap_future(self.submit(work))

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function there; from any thread."""
        self.loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel what runs there and end the thread."""
        if not self._thread.is_alive():
            return
        self.call(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
