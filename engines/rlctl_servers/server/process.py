"""An engine server as a child process that ends with this process."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.kills import kill, unended
from rlctl.runtime.server_process import dying_with_parent
from rlctl_servers.server.http import Http

log = logging.getLogger(__name__)

LOOK_S = 0.2
TAIL = 40
TERM_S = 2.0
FOLLOW_S = 10.0
"""Seconds for the server's other processes to end after its first process. They are then killed."""


_WATCH = """
import os, signal, sys
os.read(0, 1)  # nothing is written: it returns when the stage server has ended, however
os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""
"""Kills the server's processes after the stage server's end. During a start, vLLM's outlive its first process."""


class ServerProcess(abc.ABC):
    """A launched server. Its other processes end with its first process.

    Attributes:
        http: calls to the server.
    """

    def __init__(self, http: Http, python: str, start_s: float) -> None:
        """``python``: interpreter of the product's environment; ``start_s``: longest time until the server is ready."""
        self.http = http
        self.product = http.product
        self._python = python
        self._start_s = start_s
        self._popen: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._reader: threading.Thread | None = None
        self._waiter: threading.Thread | None = None
        self._ended = threading.Event()

    @abc.abstractmethod
    def command(self) -> Sequence[str]:
        """Return the arguments of the interpreter. Called once, just before the launch."""

    @abc.abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Return variables to add to the environment of this process."""

    @abc.abstractmethod
    async def ready(self) -> bool:
        """Return whether the server serves. Raises ENGINE_FAILED if a different server answers in its place."""

    def inherited(self) -> Sequence[int]:
        """Return the file descriptors that the server inherits."""
        return ()

    def redacted(self, line: str) -> str:
        """Return a log line without secrets. Runs on a separate thread."""
        return line

    def settled(self) -> None:  # noqa: B027
        """Release resources of the start. Called when the server is ready."""

    def ended(self) -> None:  # noqa: B027
        """Remove the remains of an ended server. Runs on a separate thread, perhaps before :meth:`settled`."""

    def let_go(self) -> None:  # noqa: B027
        """Release the resources of a stopped server."""

    @property
    def pid(self) -> int:
        """Return the process id, or 0 before the launch."""
        return self._popen.pid if self._popen is not None else 0

    async def start(self, on_end: Callable[[RlctlError], None]) -> None:
        """Launch the server and wait until it is ready. ``on_end`` is called on a separate thread if the server ends by
        itself.

        Raises ENGINE_FAILED with the end of the log, FIELD_INVALID for an unknown argument, DEADLINE_EXCEEDED.
        """
        self._launch(on_end)
        deadline = asyncio.get_running_loop().time() + self._start_s
        while True:
            if self._ended.is_set():
                raise self.failure()
            if await self.ready():
                self.settled()
                return
            if asyncio.get_running_loop().time() > deadline:
                raise Reason.DEADLINE_EXCEEDED.error(f"{self.product} was not ready after {self._start_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        """End the server, and kill it after TERM_S: a deadlocked server does not react.

        Processes that no kill ends are reported in the log.
        """
        self._ended.set()  # on_end is not called
        if self._popen is not None:
            # Only the first process: it takes the end of its children for a crash and investigates.
            self._popen.terminate()
            await asyncio.to_thread(self._wait, TERM_S)
            self._signal(signal.SIGKILL)
            if not await asyncio.to_thread(self._wait, TERM_S) and (running := members(self._popen.pid)):
                log.warning("%s", unended([(self.product, pid) for pid in running]))
        await self.http.close()
        self.let_go()

    def kill(self) -> None:
        """Kill all processes of the server at once; ``on_end`` is called."""
        self._signal(signal.SIGKILL)

    def log_lines(self) -> list[str]:
        """Return the last log lines that are not blank."""
        return [line for line in list(self._tail) if line.strip()]

    def failure(self) -> RlctlError:
        """Return the error for the server's end, from the end of its log."""
        lines = self.log_lines()
        for line in lines:
            if "unrecognized arguments:" in line:
                name = line.partition("unrecognized arguments:")[2].split()[0].lstrip("-").replace("-", "_")
                return Reason.FIELD_INVALID.error(
                    f"the installed {self.product} has no argument {name!r}", field=f"options.{name}"
                )
        errors = [line for line in lines if "Error" in line]
        code = self._popen.poll() if self._popen is not None else None
        cause = (errors or lines or ["it said nothing"])[-1].strip()
        return Reason.ENGINE_FAILED.error(f"{self.product} ended with {code}: {cause}")

    def _launch(self, on_end: Callable[[RlctlError], None]) -> None:
        command = self.command()
        self._popen = subprocess.Popen(
            dying_with_parent([self._python, *command], self._python),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.environment()},
            pass_fds=self.inherited(),
            process_group=0,
        )
        watch = [sys.executable, "-IS", "-c", _WATCH, str(self._popen.pid)]
        self._watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
        name = self.product.lower()
        self._reader = threading.Thread(target=self._read, args=(name,), name=f"{name}-log", daemon=True)
        self._reader.start()
        self._waiter = threading.Thread(target=self._notice, args=(on_end,), name=f"{name}-end", daemon=True)
        self._waiter.start()

    def _read(self, name: str) -> None:
        """Pass the server's log on, until its last process has ended."""
        popen = self._popen
        assert popen is not None
        assert popen.stdout is not None
        for raw in popen.stdout:
            line = self.redacted(raw.decode(errors="replace").rstrip())
            self._tail.append(line)
            with contextlib.suppress(OSError, ValueError):  # a full disk, or no reader: the server's pipe is still read
                print(f"{name}: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the log of the stage server
        popen.stdout.close()

    def _notice(self, on_end: Callable[[RlctlError], None]) -> None:
        """Notice the server's end. A stuck process with the server's output does not hide the end."""
        assert self._popen is not None
        assert self._reader is not None
        self._popen.wait()
        self._reader.join(FOLLOW_S)
        if self._reader.is_alive():
            self._signal(signal.SIGKILL)
            self._reader.join(TERM_S)
        self._unwatch()
        self.ended()
        stopping = self._ended.is_set()
        self._ended.set()
        if not stopping:
            on_end(self.failure())

    def _unwatch(self) -> None:
        """Stop the watcher of an ended server, before the number of its process group is used again."""
        watcher = self._watcher
        if watcher is not None:
            assert watcher.stdin is not None
            if error := kill(watcher, "the watcher of an ended server"):
                log.warning("%s", error)
            watcher.stdin.close()

    def _signal(self, number: int) -> None:
        if self._popen is None:
            return
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:
            return

    def _wait(self, timeout_s: float) -> bool:
        """Wait for the end of the server and of its output; returns whether both have ended."""
        if self._waiter is not None:
            assert self._reader is not None
            until = time.monotonic() + timeout_s
            self._waiter.join(timeout_s)
            self._reader.join(max(until - time.monotonic(), 0.0))
            return not self._waiter.is_alive() and not self._reader.is_alive()
        assert self._popen is not None  # the launch failed after the server's own start
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_s)
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        return self._popen.poll() is not None


def members(group: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    running = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]  # proc_pid_stat(5)
                running += [] if state in "ZX" else [int(process.name)]
    return running


def cores_of(ranks: int) -> str:
    """Divide this process's cores among ranks: "0,1|2,3". If there are fewer cores than ranks, ranks share cores."""
    cores = sorted(os.sched_getaffinity(0))
    per_rank = max(len(cores) // ranks, 1)
    shares = [[cores[(rank * per_rank + i) % len(cores)] for i in range(per_rank)] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def flags(named: Mapping[str, str]) -> list[str]:
    """Return a command line with arguments by name; "true" stands for a flag."""
    arguments = []
    for name, value in named.items():
        arguments.append(f"--{name.replace('_', '-')}")
        if value != "true":
            arguments += _words(value)
    return arguments


def _words(value: str) -> list[str]:
    """Split a JSON list, "[1, 2]", into values; return other text as a single value."""
    if value.startswith("["):
        with contextlib.suppress(ValueError):
            return [word if isinstance(word, str) else json.dumps(word) for word in json.loads(value)]
    return [value]
