"""An engine server as a child process, which does not outlive this one."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.server_process import dying_with_parent
from rlctl_servers.server.http import Http

LOOK_S = 0.2
TAIL = 40
TERM_S = 2.0


_WATCH = """
import os, signal, sys
os.read(0, 1)  # nothing is written: it returns when the stage server has ended, however
os.killpg(int(sys.argv[1]), signal.SIGKILL)
"""
"""Processes of the server's own do not all end with the first of them: vLLM's, while it starts, do not."""


class ServerProcess(abc.ABC):
    """A launched server. Its own processes end when the first of them does.

    Attributes:
        http: how to talk to it.
    """

    def __init__(self, http: Http, python: str, start_s: float) -> None:
        """``python``: interpreter that the product is installed for; ``start_s``: longest time until it is ready."""
        self.http = http
        self.product = http.product
        self._python = python
        self._start_s = start_s
        self._popen: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL)
        self._reader: threading.Thread | None = None
        self._ended = threading.Event()

    @abc.abstractmethod
    def command(self) -> Sequence[str]:
        """What the interpreter is told. Called once, just before it is."""

    @abc.abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Environment variables beside those of this process."""

    @abc.abstractmethod
    async def ready(self) -> bool:
        """Whether it serves. Raises ENGINE_FAILED when another server answers in its place."""

    def inherited(self) -> Sequence[int]:
        """File descriptors that it gets from this process."""
        return ()

    def redacted(self, line: str) -> str:
        """A line of its log as others may read it. From a thread of its own."""
        return line

    def settled(self) -> None:  # noqa: B027
        """It is ready: what it needed only to start can go."""

    def ended(self) -> None:  # noqa: B027
        """It has ended: what it leaves behind can go. From a thread of its own, perhaps before it was settled."""

    def let_go(self) -> None:  # noqa: B027
        """It has been stopped: give back what was held for it."""

    @property
    def pid(self) -> int:
        """Its process id, 0 before it runs."""
        return self._popen.pid if self._popen is not None else 0

    async def start(self, on_end: Callable[[RlctlError], None]) -> None:
        """Launch it and wait until it is ready. ``on_end`` is told, from another thread, if it ends by itself.

        Raises ENGINE_FAILED with the end of its log, FIELD_INVALID for an argument that it does not know,
        DEADLINE_EXCEEDED.
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
        """End it, at once when it does not go by itself: a deadlocked one does not react."""
        self._ended.set()  # nobody is to be told
        if self._popen is not None:
            # To the first of its processes only: the end of the others looks like a crash to it, which it looks into.
            self._popen.terminate()
            await asyncio.to_thread(self._wait, TERM_S)
            self._signal(signal.SIGKILL)
            await asyncio.to_thread(self._wait, TERM_S)
        await self.http.close()
        self.let_go()

    def kill(self) -> None:
        """End it and all of its processes at once; ``on_end`` is told."""
        self._signal(signal.SIGKILL)

    def log_lines(self) -> list[str]:
        """The last lines of its log that say something."""
        return [line for line in list(self._tail) if line.strip()]

    def failure(self) -> RlctlError:
        """Why it ended, from the end of its log."""
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
        self._reader = threading.Thread(target=self._read, args=(name, on_end), name=f"{name}-log", daemon=True)
        self._reader.start()

    def _read(self, name: str, on_end: Callable[[RlctlError], None]) -> None:
        """Pass its log on, and notice its end."""
        popen = self._popen
        assert popen is not None
        assert popen.stdout is not None
        for raw in popen.stdout:
            line = self.redacted(raw.decode(errors="replace").rstrip())
            self._tail.append(line)
            print(f"{name}: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the log of the stage server
        popen.wait()
        popen.stdout.close()
        self._unwatch()
        self.ended()
        told = self._ended.is_set()
        self._ended.set()
        if not told:
            on_end(self.failure())

    def _unwatch(self) -> None:
        """The server has ended: its process group's number may be another's soon."""
        watcher = self._watcher
        if watcher is not None:
            assert watcher.stdin is not None
            watcher.kill()
            watcher.wait()
            watcher.stdin.close()

    def _signal(self, number: int) -> None:
        if self._popen is None:
            return
        try:
            os.killpg(self._popen.pid, number)
        except ProcessLookupError:
            return

    def _wait(self, timeout_s: float) -> bool:
        assert self._reader is not None
        self._reader.join(timeout_s)
        return not self._reader.is_alive()


def cores_of(ranks: int) -> str:
    """This process's cores, shared out over ranks: "0,1|2,3". Where there are fewer than ranks, some share one."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // ranks, 1)
    shares = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def flags(named: Mapping[str, str]) -> list[str]:
    """Arguments by name as a command line has them; "true" stands for a flag."""
    arguments = []
    for name, value in named.items():
        arguments.append(f"--{name.replace('_', '-')}")
        if value != "true":
            arguments += _words(value)
    return arguments


def _words(value: str) -> list[str]:
    """A list, "[1, 2]", as an argument takes several values; anything else as it is."""
    if value.startswith("["):
        with contextlib.suppress(ValueError):
            return [word if isinstance(word, str) else json.dumps(word) for word in json.loads(value)]
    return [value]
