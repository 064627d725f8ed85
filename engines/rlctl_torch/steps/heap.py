"""Return of freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes

import torch


def give_back(device: torch.device) -> None:
    """Return freed memory to the system, because allocators keep freed memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        # malloc_trim is a function of glibc only.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
