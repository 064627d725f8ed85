"""GPUs of this machine, without loading anything that would touch them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def gpu_count(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs processes started from here see: the device files, less what CUDA_VISIBLE_DEVICES hides."""
    there = sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    shown = 0
    for name in filter(None, visible.split(",")):
        if name.strip().startswith("-"):
            break  # CUDA ignores what follows one that is not valid
        shown += 1
    return min(there, shown)
