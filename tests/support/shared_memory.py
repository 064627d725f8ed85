"""Existing shared segments: their files, and unlinked memory."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlctl.weights.tensor.placement import SHARED_MEMORY

_SEGMENT = re.compile(r"/(rlctl-[0-9a-f]{32})\b")


def mapped_by(process_id: int) -> set[str]:
    """Return names of all segments that a process has mapped."""
    return set(_SEGMENT.findall(Path(f"/proc/{process_id}/maps").read_text()))


def held(names: Iterable[str]) -> set[str]:
    """Return the segments that take up memory: a file has the name, or a process has the segment mapped or open.

    Processes of other users are not seen. Only the given names are searched: other programs have segments too.
    """
    wanted = set(names)
    found = {name for name in wanted if (SHARED_MEMORY / name).exists()}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and found != wanted:
            found |= wanted & {name for text in _files_of(process) for name in _SEGMENT.findall(text)}
    return found


def _files_of(process: Path) -> Iterator[str]:
    # The process may end meanwhile.
    with contextlib.suppress(OSError):
        yield (process / "maps").read_text()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(process / "fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(process / "fd" / descriptor)
