"""Logs of processes that run for weeks: the last lines, and a limit of the size on disk."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from pathlib import Path
from typing import IO

from rlctl.runtime import private_files
from rlctl.runtime.logs import message_of

LAST_BYTES = 8192
"""Bytes at the end of a log that are searched for the last line."""
MOST_LINE = 500
"""Most characters of a reported line."""
AT_MOST_BYTES = 64 << 20
"""Most bytes of a log. A longer log is moved to ``NAME.log.1``, which replaces the earlier copy, and starts empty."""

_BLOCK = 64 << 10
"""A multiple of the block sizes of file systems; only whole blocks can be cut off."""
_PART = 1 << 20
_COLLAPSE_RANGE = 0x08
"""FALLOC_FL_COLLAPSE_RANGE of Linux."""


def log_end(log: Path) -> int:
    """Return the end of a log that may contain lines of an earlier process; 0 without a log."""
    with contextlib.suppress(OSError):
        return log.stat().st_size
    return 0


def last_line(log: Path, start: int = 0) -> str:
    """Return the last non-empty line of a log from ``start`` on; "" without a line, or for a log on a different
    machine.

    A log that was started anew since then is read from the beginning.
    """
    return next(iter(last_lines(log, start, most=1)), "")


def last_lines(log: Path, start: int = 0, most: int = 20) -> list[str]:
    """Return the last non-empty lines of a log from ``start`` on; see :func:`last_line`."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - LAST_BYTES))
        lines = [message_of(line.strip()) for line in file.read().decode(errors="replace").splitlines()]
        return [line[:MOST_LINE] for line in lines if line][-most:]
    return []


def keep_short(log: Path, at_most: int = AT_MOST_BYTES) -> bool:
    """Move the content of a log that is too long to ``NAME.log.1`` while processes append.

    Returns whether the content was moved.

    No line is lost if the file system can cut off the beginning of a file (ext4, XFS): the log keeps the lines since
    then, and the last block. Elsewhere the log is emptied, and a line between the copy and the emptying is lost.
    Nothing happens if the disk cannot store the copy, or a different process does the same.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size <= at_most:
            return False
        rotated = log.with_name(f"{log.name}.1")
        with log.open("r+b") as file:
            if not _locked(file) or (size := os.fstat(file.fileno()).st_size) <= at_most:
                return False
            rotated.unlink(missing_ok=True)  # on a full disk, this makes room for the copy
            try:
                beginning = _copied(file, rotated, (size - 1) // _BLOCK * _BLOCK)
                if beginning and _cut_off(file, beginning):
                    return True
                _copied(file, rotated, None)
            except OSError:
                rotated.unlink(missing_ok=True)
                raise
            file.truncate(0)
        return True
    return False


def _locked(log: IO[bytes]) -> bool:
    """Lock a log until closed; False if a different process has the lock. True on a file system without locks."""
    try:
        fcntl.flock(log.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _copied(log: IO[bytes], kept: Path, size: int | None) -> int:
    """Copy the beginning of a log, or the whole log for None; returns the bytes."""
    log.seek(0)
    with open(kept, "wb", opener=private_files.opener) as copy:
        while data := log.read(_PART if size is None else min(_PART, size - copy.tell())):
            copy.write(data)
        return copy.tell()


def _cut_off(log: IO[bytes], size: int) -> bool:
    """Remove the first bytes of a file, in whole blocks, in one step; returns whether the file system can."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError):  # not Linux
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(log.fileno(), _COLLAPSE_RANGE, 0, size) == 0)
