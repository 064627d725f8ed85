"""What the process itself shows of a fault: logs, exceptions without a catcher, tasks, files, memory."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import traceback
from typing import Any

import psutil

MORE_TASKS, MORE_FILES = 60, 40
"""Most tasks of the main loop and open files after a batch, more than after the first batch."""

MORE_BYTES = 300 << 20
"""Most memory more than after the first tenth of a run. Records of ended operations and commands are bounded."""


_UNSENT = "ExecuteBatchError raised in core"
"""gRPC's own log of a status that was not sent, because the caller had disconnected."""


class Logs(logging.Handler):
    """Collects errors and tracebacks of all loggers and uncaught exceptions."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __enter__(self) -> Logs:
        self._raised, sys.unraisablehook = sys.unraisablehook, self._unraisable
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)
        sys.unraisablehook = self._raised

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an error."""
        if _UNSENT in record.getMessage():
            return
        if record.levelno >= logging.ERROR or record.exc_info:
            raised = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            self.lines.append(f"{record.name}: {record.getMessage()}\n{raised}".rstrip())

    def _unraisable(self, raised: Any) -> None:
        text = "".join(traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback))
        self.lines.append(f"unraisable in {raised.object!r}: {raised.err_msg or ''}\n{text}".rstrip())

    def taken(self) -> list[str]:
        """Return the lines since the last call, also of exceptions that no task has retrieved."""
        gc.collect()
        lines, self.lines = self.lines, []
        return lines


class Resources:
    """Tasks, open files and memory of the process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._tasks = self._files = 0
        self._bytes = 0
        self._measured = False

    def begin(self) -> None:
        """Take the present tasks and files as the normal state."""
        self._tasks, self._files = self._count()

    def begin_memory(self) -> None:
        """Take the present memory as the normal state."""
        self._bytes, self._measured = self._process.memory_info().rss, True

    @property
    def megabytes(self) -> int:
        """Memory of the process."""
        return int(self._process.memory_info().rss) >> 20

    async def excess(self) -> list[str]:
        """Return what has grown beyond the bounds. Waits up to 10 s for tasks and connections to end."""
        grown: list[str] = []
        for _ in range(50):
            tasks, files = self._count()
            grown = []
            if tasks > self._tasks + MORE_TASKS:
                names = [str(task.get_coro()) for task in asyncio.all_tasks()]
                most = max(set(names), key=names.count)
                grown.append(f"{tasks} tasks, {self._tasks} at first; {names.count(most)} times {most}")
            if files > self._files + MORE_FILES:
                grown.append(f"{files} open files, {self._files} at first")
            if not grown:
                break
            await asyncio.sleep(0.2)
        if self._measured and self._process.memory_info().rss > self._bytes + MORE_BYTES:
            grown.append(f"{self.megabytes} MB of memory, {self._bytes >> 20} at first")
        return grown

    def _count(self) -> tuple[int, int]:
        return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
