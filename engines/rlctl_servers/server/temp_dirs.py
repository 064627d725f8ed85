"""Directories for temporary files of launched servers. The remains of killed stage servers are removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import ClassVar

FRESH_S = 60.0
"""Age in seconds up to which a directory may not be locked yet."""


class Scratch:
    """The directory of one server, locked while this process or the server lives. An unlocked directory is an orphan.

    Attributes:
        prefix: common beginning of the names.
        path: the directory, for its owner only.
        lock: a file descriptor that the server inherits.
    """

    prefix: ClassVar[str]

    def __init__(self) -> None:
        """Make a directory. Remove orphans: directories of killed stage servers whose servers have ended."""
        self._remove_orphans()
        self.path = Path(tempfile.mkdtemp(prefix=self.prefix))
        self.lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the directory of an ended server. A repeat has no effect."""
        if self.lock >= 0:
            self._clear(self.path)
            os.close(self.lock)
            self.lock = -1

    @classmethod
    def _clear(cls, directory: Path) -> None:
        """Remove the directory and other remains of an ended server."""
        shutil.rmtree(directory, ignore_errors=True)

    @classmethod
    def _remove_orphans(cls) -> None:
        for directory in Path(tempfile.gettempdir()).glob(f"{cls.prefix}*"):
            try:
                if time.time() - directory.stat().st_mtime < FRESH_S:
                    continue
                lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue  # of a different user, or just removed
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    cls._clear(directory)
            except OSError:
                pass  # still in use
            finally:
                os.close(lock)
