"""The floor of shared memory: copying as many bytes between two buffers, on all cores of this process."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Memcpy:
    """Two buffers of one size, both written before: otherwise the floor would include the first touch."""

    def __init__(self, nbytes: int) -> None:
        import torch

        self.nbytes = nbytes
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        source, target = (torch.full((nbytes,), value, dtype=torch.uint8) for value in (1, 2))
        self._parts = list(zip(source.tensor_split(cores), target.tensor_split(cores), strict=True))

    def run(self) -> float:
        """Copy; return the seconds."""
        with ThreadPoolExecutor(len(self._parts)) as pool:
            started = time.perf_counter()
            list(pool.map(_copy, self._parts))
            return time.perf_counter() - started


def _copy(part: tuple[torch.Tensor, torch.Tensor]) -> None:
    source, target = part
    target.copy_(source)
