"""Atomic writes: a crash leaves either the old or the new content, never a part.

A directory is built under a temporary name, every file is brought to the disk, and only then does it take its place in
one step. Everything that publishing and pulling write goes through here, and so every failure to write is typed here.
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
from rlctl.weights.tensor.placement import host_id

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}
_THERE = {errno.ENOTEMPTY, errno.EEXIST}
_NO_ALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_POLL_S = 0.05
_BUILDING = ".building-"
_BEGUN_S = 60.0
"""By then who has begun to build holds what it builds."""


def unwritable(error: OSError, path: Path, field: str) -> RlctlError:
    """What a failure to write means: DISK_FULL (room, quota or the largest file's size), else FIELD_INVALID."""
    reason = Reason.DISK_FULL if error.errno in _FULL else Reason.FIELD_INVALID
    return reason.error(f"{path} cannot be written: {error.strerror or error}", field=field)


@contextlib.contextmanager
def writing(path: Path, field: str) -> Iterator[None]:
    """Failures to write become typed errors that blame ``field``."""
    try:
        yield
    except OSError as error:
        raise unwritable(error, path, field) from error


def create(path: Path, size: int) -> int:
    """A new file with room for ``size`` bytes, claimed now if the file system can; its descriptor. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        if size:
            allocate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def allocate(fd: int, size: int) -> None:
    """Claim room, so that a disk which is too small says so before the work and not after it."""
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
    """Bring a file to the disk. Raises OSError."""
    os.fsync(fd)


def write_file(path: Path, data: bytes) -> None:
    """A new file with this content, on the disk. Raises OSError."""
    fd = create(path, len(data))
    try:
        write_at(fd, memoryview(data), 0)
        sync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Bring a directory's entries to the disk. Raises OSError."""
    fd = _opened(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def building(place: Path) -> Iterator[Path]:
    """A new, empty directory beside ``place``, on the same file system, to be given its name; removed if it was not. It
    is held meanwhile: :func:`sweep` leaves it alone. Raises OSError.
    """
    path = place.parent / f".{place.name}{_BUILDING}{_host()}-{uuid.uuid4().hex[:16]}"
    path.mkdir()
    try:
        with _holding(path):
            yield path
    finally:
        discard(path)


def sweep(directory: Path) -> None:
    """Remove what was being built in a directory by processes of this host that have died since. What cannot be told
    stays (a file system without locks for directories, NFS say), and so does what has just been begun.
    """
    for path in directory.glob(f".*{_BUILDING}{_host()}-*") if _host() else ():
        with contextlib.suppress(OSError), _holding(path) as held:
            if held and time.time() - path.stat().st_mtime > _BEGUN_S:
                discard(path)


def _host() -> str:
    """This host, since it was booted; "" where that cannot be told. Short, because names of files are."""
    return hashlib.sha256(host_id().encode()).hexdigest()[:8] if host_id() else ""


def put_in_place(new: Path, place: Path, *, over: Callable[[], bool] = lambda: True) -> bool:
    """Give a finished directory its name; one that is there already goes, in the same step where the system can.

    Where it cannot (some network file systems), there is a moment without either; :func:`recover` knows it. ``over`` is
    asked whether what is there may go; False, and nothing has changed, when not. Raises OSError.
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
    """After a crash at any moment: the directory is there again if it was, and nothing is left beside it. For the one
    who has it :func:`locked`.
    """
    if not place.exists() and _before(place).exists():
        rename(_before(place), place)
    left = [path for path in place.parent.iterdir() if path.name.startswith(f".{place.name}{_BUILDING}")]
    for path in (*left, _before(place)):
        discard(path)


def discard(path: Path) -> None:
    """Remove a directory that was not given its name; one that was is not there under this one any more."""
    shutil.rmtree(path, ignore_errors=True)


def rename(old: Path, new: Path) -> None:
    """Raises OSError."""
    os.rename(old, new)


def exchange(one: Path, other: Path) -> bool:
    """Let two directories swap names in one step; False where the system cannot. Raises OSError."""
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
    """How long work goes on: until a deadline (on :func:`time.monotonic`'s clock), or until it is told to stop."""

    def __init__(self, deadline: float = float("inf"), stop: threading.Event | None = None) -> None:
        self._deadline = deadline
        self._stop = stop

    def check(self, doing: str) -> None:
        """Raise DEADLINE_EXCEEDED or CANCELLED, saying what was not finished, when it is over."""
        if self._stop is not None and self._stop.is_set():
            raise Reason.CANCELLED.error(f"stopped {doing}")
        if time.monotonic() >= self._deadline:
            raise Reason.DEADLINE_EXCEEDED.error(f"the time was up {doing}")


@contextlib.contextmanager
def locked(place: Path, patience: Patience, field: str) -> Iterator[None]:
    """Hold a directory against every other thread and process of this host that locks it; the system frees it when
    its holder dies.

    Raises DEADLINE_EXCEEDED and CANCELLED when somebody else holds it for too long, FIELD_INVALID or DISK_FULL when
    there can be no lock.
    """
    path = _lock_of(place)
    with writing(path, field):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _lock(fd, path, field):
            patience.check(f"while somebody else was at {place}")
            time.sleep(_POLL_S)
        with _unlocking(fd):
            yield
    finally:
        os.close(fd)


def was_locked(place: Path) -> bool:
    """Whether somebody has, or once had, a directory :func:`locked`."""
    return _lock_of(place).exists()


@contextlib.contextmanager
def alone(directory: Path, patience: Patience) -> Iterator[None]:
    """Hold a directory itself, for a moment, against every other thread and process of this host that does; where its
    file system has locks for directories. Raises DEADLINE_EXCEEDED, CANCELLED; OSError.
    """
    while True:
        with _holding(directory) as held:
            if held is not False:
                yield
                return
        patience.check(f"while somebody else was at {directory}")
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _holding(directory: Path) -> Iterator[bool | None]:
    """Whether a directory is held now; None where there are no locks. Raises OSError."""
    fd = _opened(directory)
    try:
        with _unlocking(fd):
            yield _hold(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _unlocking(fd: int) -> Iterator[None]:
    """Free it at the end also where a child that was forked meanwhile has it open."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _hold(fd: int) -> bool | None:
    """Whether it is held now until it is closed; None where there are no locks."""
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
