"""The benchmark of weight updates on a GPU that the trainer and one engine share."""

from __future__ import annotations

import torch

from tools.benchmark.figures import Figure
from tools.benchmark.gpu import checks, disk, updates

FIGURES: list[Figure] = [
    updates.IPC,
    updates.IPC_STALL,
    updates.STAGED_PAUSE,
    updates.VERIFIED,
    updates.GLOO,
    disk.FIGURE,
    checks.FIGURE,
]


def lacking() -> str:
    """Return the reason that nothing can be measured on this machine, or ""."""
    return "" if torch.cuda.is_available() else "no GPU is visible"
