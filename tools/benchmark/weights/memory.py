"""Peak memory of the ranks' processes during a piece of work (Linux)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlctl.launch.interface.launcher import Launched


@contextlib.contextmanager
def peaks(processes: Sequence[Launched]) -> Iterator[list[int]]:
    """Fill the list with each process's peak during the block, in bytes above its memory at the start."""
    extra: list[int] = []
    # 5: reset the peak to the present memory (proc(5)).
    for process in processes:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    before = [_status(process, "VmRSS") for process in processes]
    yield extra
    extra += [_status(process, "VmHWM") - held for process, held in zip(processes, before, strict=True)]


def _status(process: Launched, name: str) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{process.pid}/status has no {name}")
