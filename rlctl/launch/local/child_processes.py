"""Child processes that announce themselves: started, awaited, ended by id, never orphaned."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from rlctl.contract.errors import Reason, RlctlError
from rlctl.launch.interface.launcher import Launched
from rlctl.launch.local.log_files import keep_short, last_line, last_lines, log_end
from rlctl.runtime import private_files
from rlctl.runtime.server_process import ANNOUNCEMENT

STOP_S = 10.0
READ_S = 1.0
"""For what a process that has ended said last to be read."""
TEND_S = 30.0
"""How often it is looked whether a log has become too long."""


class Process:
    """One rlctl server in a process of its own, logging to a file that is kept short.

    Its standard input is a pipe that this process holds: when this process dies, however it dies, the child ends too.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        module: str = "rlctl",
        cpus: Sequence[int] = (),
    ) -> None:
        """Start ``rlctl ARGUMENTS``; ``module`` is run in its place, and is to do what it does.

        ``cpus``: cores that it is bound to, with all of its threads and children; none: not bound.
        """
        self.name = name
        self.log = log
        self.facts: dict[str, str] = {}
        self._announced = threading.Event()
        self._silent = threading.Event()
        """Nothing more is said: neither by it nor by a child of its own."""
        self._log_from = log_end(log)
        with open(log, "ab", opener=private_files.opener) as stderr:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--end-with-parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                process_group=0,  # Ctrl-C is for the launcher, which ends its processes in order
            )
        if cpus:
            with contextlib.suppress(ProcessLookupError):  # it has ended already, and is told by that
                os.sched_setaffinity(self._popen.pid, cpus)
        self._reader = threading.Thread(target=self._read, name=f"announcements of {name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._tend, name=f"log of {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        return self._popen.poll()

    @property
    def serves(self) -> bool:
        """Whether it has announced itself. Before that it holds nothing that would have to be given back."""
        return bool(self.facts)

    def announced(self, timeout_s: float) -> dict[str, str]:
        """What it bound, once it has. Raises ENGINE_FAILED when it ended, DEADLINE_EXCEEDED when it did not say."""
        if not self._announced.wait(timeout_s):
            raise Reason.DEADLINE_EXCEEDED.error(f"{self.name} did not come up in {timeout_s:g} s; see {self.log}")
        if not self.facts:
            self._popen.wait()
            raise self.failure()
        return self.facts

    def until_announced(self) -> dict[str, str]:
        """Wait until it has announced itself, and return what; {} when it ended before."""
        self._announced.wait()
        return self.facts

    def until_ended(self) -> int:
        """Wait until it has ended; how."""
        return self._popen.wait()

    def said(self) -> str:
        """The last line that it has logged; "" where there is none."""
        return last_line(self.log, self._log_from)

    def log_lines(self) -> list[str]:
        """The last lines that it has logged; [] when they are on another machine."""
        return last_lines(self.log, self._log_from)

    def failure(self) -> RlctlError:
        """Why it ended, from the end of its log."""
        code, said = self.returncode, self.said()
        how = f"ended with {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}" if -code in {*signal.Signals} else how
            # It had no time to say why; its last line is about something else.
            said = f"what it logged last was {said!r}" if said else ""
        why = f": {said}" if said else ""
        return Reason.ENGINE_FAILED.error(f"{self.name} {how}{why}", next_step=f"See {self.log}.")

    def terminate(self) -> None:
        """Ask it to end."""
        self._popen.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._popen.kill()

    def wait(self, timeout_s: float = STOP_S) -> bool:
        """Wait until it has ended, killing it when that takes longer; returns whether that was needed."""
        killed = False
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            killed = True
            self._popen.kill()
            self._popen.wait()
        self._reader.join(READ_S)  # longer where a child of its own goes on, which has the same standard output
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        return killed

    def _read(self) -> None:
        stdout: IO[bytes] | None = self._popen.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                with contextlib.suppress(ValueError):
                    said = json.loads(line)
                    if isinstance(said, dict) and ANNOUNCEMENT in said and not self._announced.is_set():
                        self.facts = {key: str(value) for key, value in said.items()}
                        self._announced.set()
        self._announced.set()
        self._silent.set()

    def _tend(self) -> None:
        while not self._silent.wait(TEND_S):
            if keep_short(self.log):
                self._log_from = 0


def end(process: Launched) -> None:
    """Ask it to end. One that has not announced itself is killed: while it imports torch it would not react."""
    if process.serves:
        process.terminate()
    else:
        process.kill()


def stop_all(processes: Sequence[Launched]) -> list[Launched]:
    """End processes together, last started first; returns those that had to be killed because they did not end."""
    for process in reversed(processes):
        end(process)
    deadline = time.monotonic() + STOP_S
    return [process for process in reversed(processes) if process.wait(max(0.1, deadline - time.monotonic()))]
