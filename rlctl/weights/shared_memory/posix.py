"""POSIX shared memory that no crash leaks: the owner holds a lock for its lifetime.

A segment is a file in ``/dev/shm``, ``rlctl-`` and 32 hex digits. Its first page is a header: 8 bytes of magic, and the
generation of the contents as a 64-bit integer in the host's byte order, 0 during a write. The owner holds an exclusive
``flock`` on the file; the kernel releases the lock at any end of the owner. A process that gets the lock thus knows
that the owner is dead, and may remove the file. No process ids are trusted, and PID namespaces do not matter. Files
never shrink: a valid mapping stays valid.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import sys
import weakref
from collections.abc import Iterator

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.os_errors import exhausted
from rlctl.weights.tensor.placement import SHARED_MEMORY

HEADER_BYTES = 4096
"""Offset of the contents in the file."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}
_PAGE = 4096
_MAGIC = b"rlctlseg"
_NAME = re.compile(r"rlctl-[0-9a-f]{32}")
_MAP_POPULATE: int = getattr(mmap, "MAP_POPULATE", 0)
_MADV_DONTFORK: int = getattr(mmap, "MADV_DONTFORK", 10)

_Header = ctypes.c_uint64 * 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SharedMemory:
    """A mapped segment.

    Attributes:
        name: name of the file.
        data: all bytes with the header: 1-d uint8. Mapped until the last view is gone. Another process's segment is
            mapped read-only: a write ends this process.
    """

    def __init__(self, name: str, descriptor: int, size: int, *, writable: bool) -> None:
        self.name = name
        self.data = _map(descriptor, size, writable=writable)
        self._header = _Header.from_address(self.data.data_ptr())

    @property
    def size(self) -> int:
        """Size in bytes, header included."""
        return self.data.numel()

    @property
    def generation(self) -> int:
        """Number of the present contents; 0: no contents yet, or a write in progress."""
        return self._header[1]


class OwnedMemory(SharedMemory):
    """A segment of this process. Removed by :meth:`close` or at the end of the process."""

    def __init__(self, size: int) -> None:
        """Create a segment of at least ``size`` bytes, header included, with all of its memory.

        Raises SHARED_MEMORY_FULL without room, TOO_MANY_FILES, UNSUPPORTED without POSIX shared memory.
        """
        name, descriptor = _create()
        try:
            size = -(-size // _PAGE) * _PAGE
            # Missing memory is detected here. Later it would cause a SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            super().__init__(name, descriptor, size, writable=True)
        except BaseException as error:
            _remove(name, descriptor)
            if not isinstance(error, OSError):
                raise
            raise Reason.SHARED_MEMORY_FULL.error(
                f"a segment of {size} bytes in {SHARED_MEMORY}: {error.strerror}"
            ) from error
        self._written = 0
        self._removal = weakref.finalize(self, _remove, name, descriptor)
        self._descriptor = descriptor
        self._header[0] = int.from_bytes(_MAGIC, sys.byteorder)
        _owned.add(self)

    def begin(self) -> None:
        """Start a change of the contents: readers of earlier contents can detect it."""
        self._header[1] = 0

    def end(self) -> int:
        """End a change of the contents; return the new generation."""
        self._written += 1
        self._header[1] = self._written
        return self._written

    def close(self) -> None:
        """Remove the segment and empty ``data``. Other processes keep their mapping until they notice."""
        self._removal()
        self.data = self.data.new_empty(0)
        self._header = _Header()

    def forget(self) -> None:
        """Leave the segment to the parent, in a child of a fork."""
        if self._removal.detach() is not None:
            os.close(self._descriptor)


_owned: weakref.WeakSet[OwnedMemory] = weakref.WeakSet()

_forks = 0
"""Number of forks between this process and the interpreter's first process."""


def _after_fork() -> None:
    # With the descriptor a child would keep the lock after the owner's death.
    global _forks
    _forks += 1
    for memory in list(_owned):
        memory.forget()


os.register_at_fork(after_in_child=_after_fork)


def free_bytes() -> int:
    """Return the free bytes for new segments in shared memory; 0 without shared memory."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def check_name(name: str, field: str) -> None:
    """Raise FIELD_INVALID for an invalid name of a segment: the name could be a path to anywhere."""
    if not _NAME.fullmatch(name):
        raise Reason.FIELD_INVALID.error(f"{name!r} is not the name of a segment", field=field)


def open_memory(name: str, size: int, field: str, size_field: str) -> SharedMemory:
    """Map another process's segment for reading; the fields are those of name and size in the request.

    Raises FIELD_INVALID (an invalid name, a size other than the file's, a file that is no segment), SEGMENT_NOT_FOUND,
    TOO_MANY_FILES, MEMORY_FULL.
    """
    check_name(name, field)
    with _opened(name, field) as descriptor:
        file_size = os.fstat(descriptor).st_size
        if file_size != size or size < HEADER_BYTES:
            raise Reason.FIELD_INVALID.error(f"{name} is {file_size} bytes large, not {size}", field=size_field)
        if os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            raise Reason.FIELD_INVALID.error(f"{name} is not a segment of this version", field=field)
        try:
            return SharedMemory(name, descriptor, size, writable=False)
        except OSError as error:
            raise _gone(name, error, field) from error


def map_other(name: str, size: int, field: str, size_field: str) -> tuple[torch.Tensor, tuple[int, int]]:
    """Map the first ``size`` bytes of a file in shared memory that is no segment, read-only; also return its identity.

    The caller has checked the name. Raises FIELD_INVALID (the file is smaller), SEGMENT_NOT_FOUND, TOO_MANY_FILES,
    MEMORY_FULL.
    """
    with _opened(name, field) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size < size:
            raise Reason.FIELD_INVALID.error(f"{name} is {status.st_size} bytes large, not {size}", field=size_field)
        try:
            return _map(descriptor, size, writable=False), (status.st_dev, status.st_ino)
        except OSError as error:
            raise _gone(name, error, field) from error


def identity(name: str) -> tuple[int, int] | None:
    """Return device and inode of a file in shared memory; None without such a file."""
    try:
        status = os.stat(SHARED_MEMORY / name, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def abandoned(name: str) -> bool:
    """Return whether a segment's owner is gone. In this case the file is removed, unless it belongs to another user."""
    try:
        with _opened(name, "") as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # the owner has the lock, or the system has no lock to give
                return False
            with contextlib.suppress(OSError):
                os.unlink(SHARED_MEMORY / name)
    except RlctlError:
        return not (SHARED_MEMORY / name).exists()
    return True


def sweep() -> list[str]:
    """Remove every segment whose owner is gone; return the names. Segments of other users stay."""
    try:
        names = [name for name in os.listdir(SHARED_MEMORY) if _NAME.fullmatch(name)]
    except OSError:
        return []
    return [name for name in names if abandoned(name)]


def _create() -> tuple[str, int]:
    """Create an empty, locked file; return its name and descriptor."""
    while True:
        name = f"rlctl-{secrets.token_hex(16)}"
        try:
            descriptor = os.open(SHARED_MEMORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _uncreated(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            _remove(name, descriptor)
            raise _uncreated(error) from error
        else:
            if os.fstat(descriptor).st_nlink:
                return name, descriptor
        # Another process swept the file before it was locked.
        os.close(descriptor)


def _uncreated(error: OSError) -> RlctlError:
    if error.errno in _NO_ROOM:
        return Reason.SHARED_MEMORY_FULL.error(f"a new segment in {SHARED_MEMORY}: {error.strerror}")
    return exhausted(error, f"a new segment in {SHARED_MEMORY}") or Reason.UNSUPPORTED.error(
        f"no shared memory in {SHARED_MEMORY}: {error.strerror}"
    )


def _remove(name: str, descriptor: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SHARED_MEMORY / name)
    os.close(descriptor)


@contextlib.contextmanager
def _opened(name: str, field: str) -> Iterator[int]:
    try:
        descriptor = os.open(SHARED_MEMORY / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _gone(name, error, field) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _gone(name: str, error: OSError, field: str) -> RlctlError:
    """Return the error for a file that cannot be opened or mapped."""
    if error.errno == errno.ENOMEM:
        return Reason.MEMORY_FULL.error(f"{name}: {error.strerror}", field=field)
    lack = exhausted(error, f"{name} cannot be opened", field)
    return lack or Reason.SEGMENT_NOT_FOUND.error(f"{name}: {error.strerror}", field=field)


def _map(descriptor: int, size: int, *, writable: bool) -> torch.Tensor:
    """Map a file as a tensor, 1-d uint8.

    Python's own mmap keeps a descriptor. Children of a fork would inherit the descriptor, and with it the lock and the
    memory.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED | _MAP_POPULATE, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    _libc.madvise(address, size, _MADV_DONTFORK)
    view = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(view, _unmap, address, size, _forks).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _unmap(address: int, size: int, forks: int) -> None:
    # A child of a fork has no such mapping, and may have other memory at this address.
    if forks == _forks:
        _libc.munmap(address, size)
