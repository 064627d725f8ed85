"""What a killed SGLang leaves behind, found and removed: sockets, temporary files, segments in shared memory.

SGLang removes them when it ends by itself only. So each launched server gets a directory of its own for temporary
files, and what its processes map of ``/dev/shm`` is written down there while they live: the names do not say whose they
are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "rlctl-sglang-"
FRESH_S = 60.0
"""A directory that is younger may not be locked yet."""

SEGMENTS = ("/dev/shm/sglang_loads_", "/dev/shm/sem.mp-")
"""What SGLang makes: load snapshots (``shm_path_for`` in its ``managers/load_snapshot.py``) and Python's semaphores."""

_LIST = "shared-memory"


class Scratch:
    """The directory of one server, locked while this process or the server lives: one that is not is an orphan.

    Attributes:
        path: the directory, for its owner only.
        lock: a file descriptor that the server inherits.
    """

    def __init__(self) -> None:
        """Make one, and remove those whose stage server was killed, and their servers with it."""
        _remove_orphans()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self._known: set[str] = set()

    def note(self, group: int) -> None:
        """Write down what the processes of this process group have in shared memory now."""
        found = {segment for pid in _members(group) for segment in _mapped(pid)} - self._known
        if found:
            self._known |= found
            with (self.path / _LIST).open("a") as file:
                file.writelines(f"{segment}\n" for segment in sorted(found))

    def segments(self) -> list[Path]:
        """What was written down."""
        return _segments(self.path)

    def remove(self) -> None:
        """Remove everything. The server must have ended; harmless to call again."""
        if self.lock >= 0:
            _remove(self.path)
            os.close(self.lock)
            self.lock = -1


def _members(group: int) -> list[int]:
    members = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == group:
                members.append(int(process.name))
    return members


def _mapped(pid: int) -> set[str]:
    """See proc_pid_maps(5): the path is the sixth field."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()  # it has just ended
    paths = (fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    return {path for path in paths if path.startswith(SEGMENTS) and not path.endswith(" (deleted)")}


def _segments(directory: Path) -> list[Path]:
    try:
        return [Path(line) for line in (directory / _LIST).read_text().splitlines()]
    except OSError:
        return []


def _remove(directory: Path) -> None:
    for segment in _segments(directory):
        segment.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _remove_orphans() -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if time.time() - directory.stat().st_mtime < FRESH_S:
                continue
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # somebody else's, or just removed
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(directory)
        except OSError:
            pass  # it lives
        finally:
            os.close(lock)
