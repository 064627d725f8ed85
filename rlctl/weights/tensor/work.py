"""Work on weights: on how many cores it runs, and how it ends early."""

from __future__ import annotations

import os

import torch

from rlctl.contract.errors import RlctlError


def usable_cores() -> int:
    """Cores that this process may use: as many tensors can be hashed at the same time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digesting_threads(key: bytes) -> int:
    """Threads that digest one tensor each. A keyed digest uses torch's own threads for each of them."""
    return max(1, usable_cores() // torch.get_num_threads()) if key else usable_cores()


class Stop:
    """Tells work on weights to end early, and why: the first word counts. From any thread."""

    def __init__(self) -> None:
        self.cause: RlctlError | None = None

    def set(self, cause: RlctlError) -> None:
        """End, for this reason."""
        self.cause = self.cause or cause

    def check(self) -> None:
        """Raise the reason, if there is one."""
        if self.cause is not None:
            raise self.cause
