"""Files and directories of a user: journals, state and logs contain names of models, paths and hosts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
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


def replace(path: Path, text: str) -> None:
    """Replace a file by a private file, in one step and durably. Raises OSError."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_text(draft, text)
        put_in_place(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def put_in_place(draft: Path, path: Path) -> None:
    """Rename a complete file into place. After a crash, the path has the old or the new content. Raises OSError.

    A file of the directory that was renamed before has its new name on disk first: the log of a replaced database must
    not stay beside the new database.
    """
    _sync(draft)
    sync_directory(path.parent)
    os.replace(draft, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync the names of a directory's files to disk. Raises OSError."""
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
