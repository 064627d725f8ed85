"""Kills of child processes. A process in a system call that does not return ignores a kill, and may never end.

Such a call is one of a GPU driver or of NFS.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.contract.errors import Reason, RlctlError

KILLED_S = 5.0
"""Seconds for a killed process to end."""


def kill(process: subprocess.Popen[Any], name: str, log: Path | None = None) -> RlctlError | None:
    """Kill a process and wait for its end. Return the error for a process that has not ended after KILLED_S."""
    process.kill()
    try:
        process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        return unended([(name, process.pid)], log)
    return None


def unended(processes: Sequence[tuple[str, int]], log: Path | None = None) -> RlctlError:
    """Return the error for killed processes that still run, from their names and pids."""
    names = ", ".join(f"{name} (pid {pid})" for name, pid in processes)
    verbs = ("was", "has") if len(processes) == 1 else ("were", "have")
    return Reason.ENGINE_FAILED.error(
        f"{names} {verbs[0]} killed and {verbs[1]} not ended",
        next_step="The kernel's log (dmesg) may name a system call that does not return."
        + (f" See also {log}." if log is not None else ""),
    )
