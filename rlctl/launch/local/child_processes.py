"""Child processes that announce addresses: started, awaited, ended by id, never orphaned."""

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
from rlctl.runtime import kills, private_files
from rlctl.runtime.event_loops import WAKE_S
from rlctl.runtime.kills import KILLED_S
from rlctl.runtime.server_process import ANNOUNCEMENT, STOP_S

READ_S = 1.0
"""Seconds to read the last output of an ended process."""
LOOK_S = 0.05
TEND_S = 30.0
"""Seconds between checks of the log's size."""


class Process:
    """An rlctl server in a child process, with a log of limited size.

    Standard input is a pipe of this process: when this process dies in any way, the child ends too.
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
        """Start ``rlctl ARGUMENTS``, or a ``module`` with the same interface.

        ``cpus``: cores for the process with all threads and children; empty: not bound.
        """
        self.name = name
        self.log = log
        self.facts: dict[str, str] = {}
        self._announced = threading.Event()
        self._silent = threading.Event()
        """Set once the standard output is closed by the process and its children."""
        self._log_from = log_end(log)
        with open(log, "ab", opener=private_files.opener) as stderr:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--end-with-parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                process_group=0,  # Ctrl-C is for the launcher, which ends all processes in order
            )
        if cpus:
            with contextlib.suppress(ProcessLookupError):  # already ended, as the end of the output shows
                os.sched_setaffinity(self._popen.pid, cpus)
        self._reader = threading.Thread(target=self._read, name=f"announcements of {name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._tend, name=f"log of {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while the process runs."""
        return self._popen.poll()

    @property
    def serves(self) -> bool:
        """Whether the process has announced its address. Before that, the process holds nothing to give back."""
        return bool(self.facts)

    def announced(self, timeout_s: float) -> dict[str, str]:
        """Wait for the announced facts.

        Raises ENGINE_FAILED after the process's end, DEADLINE_EXCEEDED after the time.
        """
        deadline = time.monotonic() + timeout_s
        while not self._announced.wait(max(0.0, min(WAKE_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                break
        late = not self._announced.is_set()
        if not late and not self.facts:
            try:
                self._popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # its output has ended, and the process has not
                late = True
            else:
                raise self.failure()
        if late:
            raise Reason.DEADLINE_EXCEEDED.error(f"{self.name} did not come up in {timeout_s:g} s; see {self.log}")
        return self.facts

    def until_announced(self) -> dict[str, str]:
        """Wait for the announcement and return the facts; {} if the process ended before."""
        self._announced.wait()
        return self.facts

    def until_ended(self) -> int:
        """Wait for the end and return the exit status."""
        return self._popen.wait()

    def last_log_line(self) -> str:
        """Return the last line of the log, or ""."""
        return last_line(self.log, self._log_from)

    def log_lines(self) -> list[str]:
        return last_lines(self.log, self._log_from)

    def failure(self) -> RlctlError:
        """Return the error that says why the process ended, from the end of the log."""
        code, log_excerpt = self.returncode, self.last_log_line()
        how, why = f"ended with {code}", f": {log_excerpt}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}" if -code in {*signal.Signals} else how
            # Killed without time for an explanation: the last line is about something else.
            why = f"; its last log line: {log_excerpt}"
        return Reason.ENGINE_FAILED.error(f"{self.name} {how}{why * bool(log_excerpt)}", next_step=f"See {self.log}.")

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()

    def wait(self, timeout_s: float = STOP_S, killed_s: float = KILLED_S) -> bool:
        """Wait for the end, with a kill after the time; returns whether the kill was needed.

        A process that has not ended ``killed_s`` after the kill still runs, and :attr:`returncode` stays None.
        """
        killed = False
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            killed = True
            self._popen.kill()
            try:
                self._popen.wait(killed_s)
            except subprocess.TimeoutExpired:
                return True
        self._reader.join(READ_S)  # takes longer if a child of the process continues with the same standard output
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        return killed

    def _read(self) -> None:
        stdout: IO[bytes] | None = self._popen.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if isinstance(message, dict) and ANNOUNCEMENT in message and not self._announced.is_set():
                        self.facts = {key: str(value) for key, value in message.items()}
                        self._announced.set()
        self._announced.set()
        self._silent.set()

    def _tend(self) -> None:
        while not self._silent.wait(TEND_S):
            if keep_short(self.log):
                self._log_from = 0


def end(process: Launched) -> None:
    """Ask a process to end.

    A process without an announcement is killed: during the import of torch no signal is handled.
    """
    if process.serves:
        process.terminate()
    else:
        process.kill()


def stop_all(processes: Sequence[Launched]) -> list[Launched]:
    """End processes together, the last started first; returns the processes that had to be killed.

    Takes STOP_S and KILLED_S at most. :func:`unended` names processes that still run afterwards.
    """
    for process in reversed(processes):
        end(process)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline and any(process.returncode is None for process in processes):
        time.sleep(LOOK_S)
    late = [process for process in reversed(processes) if process.returncode is None]
    for process in late:
        process.kill()
    deadline = time.monotonic() + KILLED_S
    for process in reversed(processes):
        process.wait(max(0.0, deadline - time.monotonic()), 0.0)
    return late


def unended(processes: Sequence[Launched]) -> RlctlError | None:
    """Return the error for killed processes that still run, or None."""
    running = [process for process in processes if process.returncode is None]
    if not running:
        return None
    return kills.unended([(process.name, process.pid) for process in running], running[0].log)
