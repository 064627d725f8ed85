"""Atomic writes: a crash leaves either the old or the new content, never a part.

A directory is built under a temporary name, every file is synced, and then the directory is renamed into place in one
step. All writes of publishing and pulling use this module, so every write failure gets its type here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.os_errors import exhausted
from rlctl.weights.tensor.placement import host_id

_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
_THERE = {errno.ENOTEMPTY, errno.EEXIST}
_NO_ALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_POLL_S = 0.05
_BUILDING = ".building-"
_BEGUN_S = 60.0
"""Age in seconds after which a build that is not locked is abandoned."""


def unwritable(error: OSError, path: Path, field: str) -> RlctlError:
    """Return the error for a failed write: DISK_FULL, TOO_MANY_FILES, else FIELD_INVALID."""
    action = f"{path} cannot be written"
    return exhausted(error, action, field) or Reason.FIELD_INVALID.error(
        f"{action}: {error.strerror or error}", field=field
    )


@contextlib.contextmanager
def writing(path: Path, field: str) -> Iterator[None]:
    """Convert write failures to typed errors with ``field``."""
    try:
        yield
    except OSError as error:
        raise unwritable(error, path, field) from error


def create(path: Path, size: int) -> int:
    """Create a file with space for ``size`` bytes, reserved if possible; return its descriptor. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        if size:
            allocate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def allocate(fd: int, size: int) -> None:
    """Reserve space, so that a full disk is reported before the work, not after."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _NO_ALLOCATE:
            raise
        os.ftruncate(fd, size)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at an offset. Raises OSError."""
    while data.nbytes:
        count = os.pwrite(fd, data, offset)
        data = data[count:]
        offset += count


def sync(fd: int) -> None:
    """Sync a file to disk. Raises OSError."""
    os.fsync(fd)


def write_file(path: Path, data: bytes) -> None:
    """Create a file with this content and sync it. Raises OSError."""
    fd = create(path, len(data))
    try:
        write_at(fd, memoryview(data), 0)
        sync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Sync a directory's entries to disk. Raises OSError."""
    fd = _opened(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def building(place: Path) -> Iterator[Path]:
    """Create an empty directory beside ``place``, on the same file system; remove the directory unless it was renamed.

    The directory is locked meanwhile, so that :func:`sweep` skips it. Raises OSError.
    """
    path = place.parent / f".{place.name}{_BUILDING}{_host()}-{uuid.uuid4().hex[:16]}"
    path.mkdir()
    try:
        with alone(path, Patience()):  # a sweep has the lock for a moment only
            yield path
    finally:
        discard(path)


def sweep(directory: Path) -> None:
    """Remove abandoned builds of dead processes of this host from a directory.

    Kept are recent builds, and builds without a detectable owner (on a file system without locks for directories, such
    as NFS).
    """
    for path in directory.glob(f".*{_BUILDING}{_host()}-*") if _host() else ():
        with contextlib.suppress(OSError), _holding(path) as acquired:
            if acquired and time.time() - path.stat().st_mtime > _BEGUN_S:
                discard(path)


def _host() -> str:
    """Return the identity of this host's present boot; "" if unknown. Short, because file names are limited."""
    return hashlib.sha256(host_id().encode()).hexdigest()[:8] if host_id() else ""


def put_in_place(new: Path, place: Path, *, over: Callable[[], bool] = lambda: True) -> bool:
    """Rename a finished directory into place; an existing directory is replaced, in the same step if the system can.

    Some network file systems cannot: then there is a moment without either, which :func:`recover` repairs. ``over``
    decides whether an existing directory may be replaced; if not, nothing is changed and the result is False. Raises
    OSError.
    """
    sync_directory(new)
    try:
        rename(new, place)
    except OSError as error:
        if error.errno not in _THERE:
            raise
        if not over():
            return False
        if not exchange(new, place):
            rename(place, _before(place))
            try:
                rename(new, place)
            except OSError:
                rename(_before(place), place)
                raise
    sync_directory(place.parent)
    discard(_before(place))
    return True


def recover(place: Path) -> None:
    """Repair after a crash: restore a directory that was being replaced, and remove remains beside it.

    The caller has the directory :func:`locked`.
    """
    if not place.exists() and _before(place).exists():
        rename(_before(place), place)
    builds = [path for path in place.parent.iterdir() if path.name.startswith(f".{place.name}{_BUILDING}")]
    for path in (*builds, _before(place)):
        discard(path)


def discard(path: Path) -> None:
    """Delete a temporary directory. No-op after the directory was renamed into place."""
    shutil.rmtree(path, ignore_errors=True)


def rename(old: Path, new: Path) -> None:
    """Rename a file or directory. Raises OSError."""
    os.rename(old, new)


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two directories atomically; False if the system cannot. Raises OSError."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


class Patience:
    """Limit of work: a deadline (on :func:`time.monotonic`'s clock) or a stop event."""

    def __init__(self, deadline: float = float("inf"), stop: threading.Event | None = None) -> None:
        self._deadline = deadline
        self._stop = stop

    def check(self, doing: str) -> None:
        """Raise DEADLINE_EXCEEDED or CANCELLED, with the unfinished work, after the limit."""
        if self._stop is not None and self._stop.is_set():
            raise Reason.CANCELLED.error(f"stopped {doing}")
        if time.monotonic() >= self._deadline:
            raise Reason.DEADLINE_EXCEEDED.error(f"the time was up {doing}")


@contextlib.contextmanager
def locked(place: Path, patience: Patience, field: str) -> Iterator[None]:
    """Lock a directory against other threads and processes of this host that lock it; the lock ends with its holder.

    Raises DEADLINE_EXCEEDED and CANCELLED if another holder keeps the lock too long, FIELD_INVALID or DISK_FULL if no
    lock can be made.
    """
    path = _lock_of(place)
    with writing(path, field):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _lock(fd, path, field):
            patience.check(f"while another process held the lock of {place}")
            time.sleep(_POLL_S)
        with _unlocking(fd):
            yield
    finally:
        os.close(fd)


def was_locked(place: Path) -> bool:
    """Return whether a directory is, or ever was, :func:`locked`."""
    return _lock_of(place).exists()


@contextlib.contextmanager
def alone(directory: Path, patience: Patience) -> Iterator[None]:
    """Lock a directory itself for a moment, if its file system has locks for directories.

    The lock excludes other threads and processes of this host with the same lock. Raises DEADLINE_EXCEEDED, CANCELLED;
    OSError.
    """
    while True:
        with _holding(directory) as acquired:
            if acquired is not False:
                yield
                return
        patience.check(f"while another process held the lock of {directory}")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _holding(directory: Path) -> Iterator[bool | None]:
    """Lock a directory; yield whether that succeeded, or None without support for locks. Raises OSError."""
    fd = _opened(directory)
    try:
        with _unlocking(fd):
            yield _hold(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _unlocking(fd: int) -> Iterator[None]:
    """Unlock at the end, even if a child that was forked meanwhile has the file open."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _hold(fd: int) -> bool | None:
    """Lock until the descriptor is closed; return whether that succeeded, or None without support for locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _lock(fd: int, path: Path, field: str) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise unwritable(error, path, field) from error
    return True


def _lock_of(place: Path) -> Path:
    return place.parent / f".{place.name}.lock"


def _before(place: Path) -> Path:
    return place.parent / f".{place.name}.before"
