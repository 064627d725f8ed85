"""Opening files that lie where others put them: what is no regular file is refused, and never waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """A descriptor to read from, which the caller closes. A pipe without a writer would otherwise block for ever.

    Raises OSError: no such file, or one that is a directory, a pipe, a socket or a device.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file")
    return fd


def read_regular(path: Path) -> bytes:
    """A small file's contents. Raises OSError as :func:`open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read()
