"""Remains of a killed SGLang, found and removed: sockets, temporary files, segments in shared memory.

SGLang removes these only at an orderly end. So each launched server gets a directory of its own for temporary files.
The segments of ``/dev/shm`` that the processes map are recorded there while the processes live, since the names of
segments do not tell the owner.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rlctl_servers.server import temp_dirs
from rlctl_servers.server.process import members

PREFIX = "rlctl-sglang-"

SEGMENTS = ("/dev/shm/sglang_loads_", "/dev/shm/sem.mp-")
"""SGLang's segments: load snapshots (``shm_path_for`` in its ``managers/load_snapshot.py``) and Python's semaphores."""

_LIST = "shared-memory"


class Scratch(temp_dirs.Scratch):
    """The directory of one server, and its segments."""

    prefix: ClassVar[str] = PREFIX

    def __init__(self) -> None:
        super().__init__()
        self._known: set[str] = set()

    def note(self, group: int) -> None:
        """Record the segments that the processes of this process group have mapped now."""
        segments = {segment for pid in members(group) for segment in _mapped(pid)} - self._known
        if segments:
            self._known |= segments
            with (self.path / _LIST).open("a") as file:
                file.writelines(f"{segment}\n" for segment in sorted(segments))

    def segments(self) -> list[Path]:
        return _segments(self.path)

    @classmethod
    def _clear(cls, directory: Path) -> None:
        for segment in _segments(directory):
            segment.unlink(missing_ok=True)
        super()._clear(directory)


def _mapped(pid: int) -> set[str]:
    """Return the segments that a process has mapped. See proc_pid_maps(5): the path is the sixth field."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()  # the process has just ended
    paths = (fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    return {path for path in paths if path.startswith(SEGMENTS) and not path.endswith(" (deleted)")}


def _segments(directory: Path) -> list[Path]:
    try:
        return [Path(line) for line in (directory / _LIST).read_text().splitlines()]
    except OSError:
        return []
