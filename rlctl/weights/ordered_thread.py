"""A thread for jobs in order, which the end of the process does not wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future


class OrderedThread:
    """A daemon thread that carries out jobs in order.

    At the end of the process Python waits for the threads of executors, and only then the exit handlers run, which end
    a broadcast. A job that waits for another process would then delay the end until its own deadline.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stopped = False
        self._queue: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._queue.put((future, job))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    def shutdown(self) -> None:
        """Cancel the queued jobs, and wait for the end of the present job."""
        self._stopped = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            future, job = entry
            if self._stopped:
                future.cancel()
            else:
                try:
                    job()
                except BaseException as error:  # noqa: BLE001 - raised where the job is awaited
                    future.set_exception(error)
                else:
                    future.set_result(None)
            del entry, future, job  # these refer to tensors
