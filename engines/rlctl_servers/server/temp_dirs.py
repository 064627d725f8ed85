"""Directories of launched servers for their temporary files: what a killed stage server leaves is found and removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import ClassVar

FRESH_S = 60.0
"""A directory that is younger may not be locked yet."""


class Scratch:
    """The directory of one server, locked while this process or the server lives: one that is not is an orphan.

    Attributes:
        prefix: what the names of all of its kind begin with.
        path: the directory, for its owner only.
        lock: a file descriptor that the server inherits.
    """

    prefix: ClassVar[str]

    def __init__(self) -> None:
        """Make one, and remove those whose stage server was killed, and their servers with it."""
        self._remove_orphans()
        self.path = Path(tempfile.mkdtemp(prefix=self.prefix))
        self.lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove everything. The server must have ended; harmless to call again."""
        if self.lock >= 0:
            self._clear(self.path)
            os.close(self.lock)
            self.lock = -1

    @classmethod
    def _clear(cls, directory: Path) -> None:
        """Remove a directory whose server has ended, and what else that has left."""
        shutil.rmtree(directory, ignore_errors=True)

    @classmethod
    def _remove_orphans(cls) -> None:
        for directory in Path(tempfile.gettempdir()).glob(f"{cls.prefix}*"):
            try:
                if time.time() - directory.stat().st_mtime < FRESH_S:
                    continue
                lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue  # somebody else's, or just removed
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    cls._clear(directory)
            except OSError:
                pass  # it lives
            finally:
                os.close(lock)
