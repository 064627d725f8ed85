"""Files and directories of a user: journals, state and logs contain names of models, paths and hosts."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

FILE = 0o600
DIRECTORY = 0o700


def opener(path: str, flags: int) -> int:
    """Open a file for ``open(opener=)``. A new file, or an own file readable by other users, becomes private."""
    descriptor = os.open(path, flags, FILE)
    with contextlib.suppress(OSError):  # another user's file, or a pipe
        if os.fstat(descriptor).st_uid == os.geteuid():
            os.fchmod(descriptor, FILE)
    return descriptor


def write_text(path: Path, text: str) -> None:
    with open(path, "w", opener=opener) as file:
        file.write(text)


def make_directory(path: Path, *, own: bool = False) -> None:
    """Make a private directory if it does not exist. ``own``: also make an existing directory private."""
    path.mkdir(mode=DIRECTORY, parents=True, exist_ok=True)
    if own:
        tighten(path, DIRECTORY)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Exclude other threads and processes of this host that lock the directory. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def tighten(path: Path, mode: int = FILE) -> None:
    """Remove other users' rights to a path. No-op if the path is missing or has a different owner."""
    with contextlib.suppress(OSError):
        path.chmod(mode)
