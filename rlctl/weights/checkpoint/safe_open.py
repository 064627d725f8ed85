"""Opens files of other programs. Refuses files that are not regular, or larger than any config, index or manifest."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 100_000_000
"""Maximum size of a file that is read whole; the header of a safetensors file has the same limit."""


def open_regular(path: Path) -> int:
    """Open a file for reading; the caller closes the descriptor.

    A pipe without a writer would otherwise block for ever. Raises OSError: no such file, or a directory, a pipe, a
    socket or a device.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """Read a small file. Raises OSError as :func:`open_regular`, and for more than MOST_BYTES."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise OSError(errno.EINVAL, f"it has {size} bytes, more than the {MOST_BYTES} that are read", str(path))
        return file.read(size)
