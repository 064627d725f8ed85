"""POSIX shared memory that no crash leaks: its owner holds a lock on it for as long as it lives.

A segment is a file in ``/dev/shm``, ``rlctl-`` and 32 hex digits. Its first page is a header: 8 bytes of magic, and the
number of its present contents as a 64-bit integer in the host's byte order, 0 while they are being written. The owner
holds an exclusive ``flock`` on the file; the kernel lets go of it however the owner ends. So whoever gets the lock
knows that the owner is dead and may remove the file, without trusting process ids, across PID namespaces too. Files are
never made shorter: a mapping that was valid stays so.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from rlctl.weights.tensor.placement import SHARED_MEMORY

HEADER_BYTES = 4096
"""Where the contents start."""

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
        name: its file's name.
        data: all of it, header included: 1-d uint8. It stays mapped until the last view of it is gone. Writing into
            what another process owns ends this one: it is mapped read-only.
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
        """Number of the contents that stand in it now; 0: none, or they are being written."""
        return self._header[1]


class OwnedMemory(SharedMemory):
    """A segment that this process has made. It goes with the process, or with :meth:`close`."""

    def __init__(self, size: int) -> None:
        """Make a segment of at least ``size`` bytes, header included, with all of its memory.

        Raises SHARED_MEMORY_FULL when there is no room for it, UNSUPPORTED where there is no POSIX shared memory.
        """
        name, descriptor = _create()
        try:
            size = -(-size // _PAGE) * _PAGE
            # Memory that is missing is found out here; later it would be a SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            super().__init__(name, descriptor, size, writable=True)
        except OSError as error:
            _remove(name, descriptor)
            raise Reason.SHARED_MEMORY_FULL.error(
                f"a segment of {size} bytes in {SHARED_MEMORY}: {error.strerror}"
            ) from error
        self._written = 0
        self._removal = weakref.finalize(self, _remove, name, descriptor)
        self._descriptor = descriptor
        self._header[0] = int.from_bytes(_MAGIC, sys.byteorder)
        _owned.add(self)

    def begin(self) -> None:
        """The contents are about to change: whoever still reads the earlier ones can tell."""
        self._header[1] = 0

    def end(self) -> int:
        """The contents stand; returns their number."""
        self._written += 1
        self._header[1] = self._written
        return self._written

    def close(self) -> None:
        """Remove it; ``data`` is empty then. Others who mapped it keep the memory until they notice."""
        self._removal()
        self.data = self.data.new_empty(0)
        self._header = _Header()

    def forget(self) -> None:
        """In a child of a fork: leave it to the parent."""
        if self._removal.detach() is not None:
            os.close(self._descriptor)


_owned: weakref.WeakSet[OwnedMemory] = weakref.WeakSet()

_forks = 0
"""How many forks lie between this process and the first one of this interpreter."""


def _after_fork() -> None:
    # A child that kept the descriptor would keep the lock when the owner dies.
    global _forks
    _forks += 1
    for memory in list(_owned):
        memory.forget()


os.register_at_fork(after_in_child=_after_fork)


def free_bytes() -> int:
    """Bytes that new segments may take in shared memory; 0 where there is none."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def check_name(name: str, field: str) -> None:
    """Raise FIELD_INVALID for a name that no segment has: it might be a path to anywhere."""
    if not _NAME.fullmatch(name):
        raise Reason.FIELD_INVALID.error(f"{name!r} is not the name of a segment", field=field)


def open_memory(name: str, size: int, field: str, size_field: str) -> SharedMemory:
    """Map another process's segment, to read it; the fields are where the request has its name and size.

    Raises FIELD_INVALID (no name of a segment, another size than the file's, no segment in it), SEGMENT_NOT_FOUND.
    """
    check_name(name, field)
    with _opened(name, field) as descriptor:
        found = os.fstat(descriptor).st_size
        if found != size or size < HEADER_BYTES:
            raise Reason.FIELD_INVALID.error(f"{name} is {found} bytes large, not {size}", field=size_field)
        if os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            raise Reason.FIELD_INVALID.error(f"{name} is not a segment of this version", field=field)
        try:
            return SharedMemory(name, descriptor, size, writable=False)
        except OSError as error:
            raise _gone(name, error, field) from error


def map_other(name: str, size: int, field: str, size_field: str) -> tuple[torch.Tensor, tuple[int, int]]:
    """Map the first ``size`` bytes of a file in shared memory that is no segment, read-only; its identity beside it.

    The caller has checked the name. Raises FIELD_INVALID (the file is smaller), SEGMENT_NOT_FOUND.
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
    """Device and inode of a file in shared memory; None: there is none of this name."""
    try:
        status = os.stat(SHARED_MEMORY / name, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def abandoned(name: str) -> bool:
    """Whether a segment's owner is gone; then its file is too, when this returns."""
    try:
        with _opened(name, "") as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SHARED_MEMORY / name)
    except RlctlError:
        return not (SHARED_MEMORY / name).exists()
    except BlockingIOError:
        return False
    return True


def sweep() -> list[str]:
    """Remove every segment whose owner is gone; returns their names. Those of other users stay."""
    try:
        names = [name for name in os.listdir(SHARED_MEMORY) if _NAME.fullmatch(name)]
    except OSError:
        return []
    return [name for name in names if abandoned(name)]


def _create() -> tuple[str, int]:
    """A new, empty, locked file: (name, descriptor)."""
    while True:
        name = f"rlctl-{secrets.token_hex(16)}"
        try:
            descriptor = os.open(SHARED_MEMORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Reason.UNSUPPORTED.error(f"no shared memory in {SHARED_MEMORY}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            if os.fstat(descriptor).st_nlink:
                return name, descriptor
        # Somebody swept it in the moment before it was locked.
        os.close(descriptor)


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
    return Reason.SEGMENT_NOT_FOUND.error(f"{name}: {error.strerror}", field=field)


def _map(descriptor: int, size: int, *, writable: bool) -> torch.Tensor:
    """A file as a tensor, 1-d uint8.

    Python's own mmap keeps a descriptor, which children of a fork would inherit, and with it the lock and the memory.
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
    # A child of a fork has none of it mapped, and may have something else there by now.
    if forks == _forks:
        _libc.munmap(address, size)
