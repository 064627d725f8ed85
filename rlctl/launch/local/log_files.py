"""Logs of processes that run for weeks: their last lines, and a limit of their size on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from rlctl.runtime import private_files

LAST_BYTES = 8192
"""How far back a log is looked into for its last line."""
MOST_LINE = 500
"""Characters of a line that is passed on."""
AT_MOST_BYTES = 64 << 20
"""Of a log; one that has grown longer is kept as ``NAME.log.1``, in the place of the one before, and begins anew."""


def log_end(log: Path) -> int:
    """Where a log ends that may be another's before; 0 where there is none."""
    with contextlib.suppress(OSError):
        return log.stat().st_size
    return 0


def last_line(log: Path, start: int = 0) -> str:
    """The last line of a log from ``start`` on that says something; "" where there is none, or the log is on another
    machine. One that has begun anew since is read from its beginning.
    """
    return next(iter(last_lines(log, start, most=1)), "")


def last_lines(log: Path, start: int = 0, most: int = 20) -> list[str]:
    """The last lines of a log from ``start`` on that say something, as :func:`last_line` finds the last one."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - LAST_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return [line[:MOST_LINE] for line in lines if line][-most:]
    return []


def keep_short(log: Path, at_most: int = AT_MOST_BYTES) -> bool:
    """Let a log that is too long begin anew, while whoever appends to it goes on: what it holds is copied and cut off.
    A line that comes just between the two is lost. Nothing happens where the disk does not take the copy. Returns
    whether it has begun anew.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size <= at_most:
            return False
        kept = log.with_name(f"{log.name}.1")
        kept.unlink(missing_ok=True)  # on a full disk, that is the room for the copy
        try:
            with log.open("rb") as source, open(kept, "wb", opener=private_files.opener) as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        except OSError:
            kept.unlink(missing_ok=True)
            raise
        os.truncate(log, 0)
        return True
    return False
