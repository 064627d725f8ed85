"""Opens files that other programs have written. A file that is not regular is refused at once, and so is one that is
larger than any config, index or manifest.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 100_000_000
"""Of a file that is read whole; the header of a safetensors file has the same limit."""


def open_regular(path: Path) -> int:
    """A descriptor to read from, which the caller closes. A pipe without a writer would otherwise block for ever.

    Raises OSError: no such file, or one that is a directory, a pipe, a socket or a device.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """A small file's contents. Raises OSError as :func:`open_regular`, and for one of more than MOST_BYTES."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than the {MOST_BYTES} that are read", str(path))
        return file.read(size)
