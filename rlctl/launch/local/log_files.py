"""Logs of processes that run for weeks: their last lines, and a limit of their size on disk."""

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
"""How far back a log is looked into for its last line."""
MOST_LINE = 500
"""Characters of a line that is passed on."""
AT_MOST_BYTES = 64 << 20
"""Of a log; one that has grown longer is kept as ``NAME.log.1``, in the place of the one before, and begins anew."""

_BLOCK = 64 << 10
"""A multiple of the block sizes of file systems; only whole blocks can be cut off."""
_PART = 1 << 20
_COLLAPSE_RANGE = 0x08
"""FALLOC_FL_COLLAPSE_RANGE of Linux."""


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
        lines = [message_of(line.strip()) for line in file.read().decode(errors="replace").splitlines()]
        return [line[:MOST_LINE] for line in lines if line][-most:]
    return []


def keep_short(log: Path, at_most: int = AT_MOST_BYTES) -> bool:
    """Move what a log that is too long holds to ``NAME.log.1``, while others append to it. Returns whether it did.

    No line is lost where the file system can cut off the beginning of a file (ext4, XFS): the log keeps what has come
    since, and its last block. Elsewhere the log is emptied, and a line that comes just between the copy and that is
    lost. Nothing happens where the disk does not take the copy, or while another process does the same.
    """
    with contextlib.suppress(OSError):
        if log.stat().st_size <= at_most:
            return False
        kept = log.with_name(f"{log.name}.1")
        with log.open("r+b") as file:
            if not _locked(file) or (size := os.fstat(file.fileno()).st_size) <= at_most:
                return False
            kept.unlink(missing_ok=True)  # on a full disk, that is the room for the copy
            try:
                beginning = _copied(file, kept, (size - 1) // _BLOCK * _BLOCK)
                if beginning and _cut_off(file, beginning):
                    return True
                _copied(file, kept, None)
            except OSError:
                kept.unlink(missing_ok=True)
                raise
            file.truncate(0)
        return True
    return False


def _locked(log: IO[bytes]) -> bool:
    """Lock a log until it is closed; whether no other process has. Without a lock where the file system has none."""
    try:
        fcntl.flock(log.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _copied(log: IO[bytes], kept: Path, size: int | None) -> int:
    """Copy the beginning of a log, all of it for None; returns the bytes."""
    log.seek(0)
    with open(kept, "wb", opener=private_files.opener) as copy:
        while data := log.read(_PART if size is None else min(_PART, size - copy.tell())):
            copy.write(data)
        return copy.tell()


def _cut_off(log: IO[bytes], size: int) -> bool:
    """Remove the first bytes of a file, whole blocks, in one step; whether the file system can."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError):  # not Linux
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return bool(fallocate(log.fileno(), _COLLAPSE_RANGE, 0, size) == 0)
