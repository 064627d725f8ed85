"""Several gateway processes on one TCP port, forked at the start by a parent that only waits.

The kernel distributes connections (SO_REUSEPORT). A process that dies is replaced after a growing pause; the other
processes continue. The parent holds a pipe. Its death closes the pipe, and all processes end.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from rlctl.runtime.kills import KILLED_S, unended
from rlctl.runtime.server_process import ENDS_S

PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
STEADY_S = 60.0
"""Seconds after which a process counts as stable: its end restarts the pauses at the shortest."""

LOOK_S = 0.1

_ENDING = (signal.SIGTERM, signal.SIGINT)


def hold(host: str, port: int) -> tuple[socket.socket, int]:
    """Reserve a port for several listeners by a socket that does not listen. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reservation = socket.socket(family, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reservation.bind((host, port))
    return reservation, reservation.getsockname()[1]


class Workers:
    """The parent process, without threads and event loop, so that a fork is possible at any time."""

    def __init__(self, count: int, work: Callable[[Callable[[], None], int], NoReturn], ends_s: float = ENDS_S) -> None:
        """``work(ready, number)`` runs in each process: it calls ``ready`` once it listens, and ends on SIGTERM or at
        the end of standard input. Processes are numbered from 0; a replacement keeps the number. A process is killed
        if it has not ended ``ends_s`` seconds after SIGTERM.
        """
        self._count = count
        self._work = work
        self._ends_s = ends_s
        self._began: dict[int, float] = {}
        self._numbers: dict[int, int] = {}
        self._stopping = False
        self._stopped_at = self._killed_at = math.inf
        self._alive = os.pipe()
        self._ready = os.pipe()

    def run(self, announce: Callable[[], None], *, end_with_parent: bool) -> int:
        """Run until SIGTERM, SIGINT or the end of standard input. Call ``announce`` when all processes listen.

        Returns the exit status: of the first process to end before all have listened, 1 if no kill ends a process,
        else 0.
        """
        for number in _ENDING:
            signal.signal(number, self._stop)
        self._fork_missing()
        starting, failures, code, restart_at = self._count, 0, 0, math.inf
        watched = [self._ready[0], *([0] if end_with_parent else [])]
        while self._began or not self._stopping:
            readable, _, _ = select.select(watched, [], [], LOOK_S)
            if 0 in readable and not os.read(0, 4096):
                watched.remove(0)
                self._stop()
            if self._ready[0] in readable:
                starting -= len(os.read(self._ready[0], self._count))
                if not starting:
                    announce()
            for lasted, status in self._ended():
                if starting > 0 and not self._stopping:
                    code = status or 1
                    self._stop()
                failures = failures + 1 if lasted < STEADY_S else 0
                restart_at = time.monotonic() + PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            if not self._stopping and time.monotonic() >= restart_at:
                restart_at = math.inf
                self._fork_missing()
            if self._kill_late():
                error = unended([(f"gateway process {self._numbers[pid]}", pid) for pid in self._began])
                print(error, file=sys.stderr, flush=True)  # noqa: T201 - the log of the gateway
                return 1
        return code

    def _kill_late(self) -> bool:
        """Kill processes that do not end. Returns whether a process has not ended after the kill."""
        now = time.monotonic()
        if now > self._stopped_at + self._ends_s:
            self._killed_at = min(self._killed_at, now)
            self._signal(signal.SIGKILL)
        return now > self._killed_at + KILLED_S and bool(self._began)

    def _fork_missing(self) -> None:
        while len(self._began) < self._count and not self._stopping:
            self._fork()

    def _fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # until the pid is recorded
        place = min(set(range(self._count)).difference(self._numbers.values()))
        pid = os.fork()
        if pid:
            self._began[pid], self._numbers[pid] = time.monotonic(), place
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            return
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        os.close(self._alive[1])
        os.dup2(self._alive[0], 0)
        code = 1
        try:
            self._work(self._is_ready, place)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except Exception:  # noqa: BLE001 its parent only learns that it has ended
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _is_ready(self) -> None:
        os.write(self._ready[1], b".")

    def _ended(self) -> Iterator[tuple[float, int]]:
        while self._began:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._numbers.pop(pid, None)
            yield time.monotonic() - self._began.pop(pid, 0.0), os.waitstatus_to_exitcode(status)

    def _stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        del number, frame
        self._stopping = True
        self._stopped_at = min(self._stopped_at, time.monotonic())
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for pid in self._began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
