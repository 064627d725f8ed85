"""Work on weights: number of cores, and early end."""

from __future__ import annotations

import os

import torch

from rlctl.contract.errors import RlctlError


def usable_cores() -> int:
    """Return the number of cores of this process: as many tensors can be hashed at the same time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digesting_threads(key: bytes) -> int:
    """Return the number of threads that digest a tensor each. A keyed digest uses torch's own threads in each."""
    return max(1, usable_cores() // torch.get_num_threads()) if key else usable_cores()


class Stop:
    """A request to end work on weights early, with its cause. The first cause counts. From any thread."""

    def __init__(self) -> None:
        self.cause: RlctlError | None = None

    def set(self, cause: RlctlError) -> None:
        self.cause = self.cause or cause

    def check(self) -> None:
        if self.cause is not None:
            raise self.cause
