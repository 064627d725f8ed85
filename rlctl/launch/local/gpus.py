"""The GPUs of this machine, and the GPU of each rank. Loads no library that would touch a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlctl.engine import brings_ranks


def gpu_count(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Return the number of visible NVIDIA GPUs: the device files without GPUs hidden by CUDA_VISIBLE_DEVICES."""
    device_count = sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia[0-9]*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return device_count
    visible_count = 0
    for name in filter(None, visible.split(",")):
        if name.strip().startswith("-"):
            break  # CUDA ignores all entries after an invalid entry
        visible_count += 1
    return min(device_count, visible_count)


def kind(device: str, gpus: int) -> str:
    """Return ``device``, with "auto" replaced by "cuda" on a machine with GPUs and by "cpu" elsewhere."""
    if device == "auto":
        return "cuda" if gpus else "cpu"
    return device


def of_process(device: str, engine: str, rank: int) -> str:
    """Return the device of a process started by hand on this machine: "cpu", "cuda:N", or "cuda" for a server engine.

    Ranks of other engines take the GPUs of a machine in order. The ranks of a second machine start at the first GPU
    there. So does a process that sees a single GPU.
    """
    gpus = gpu_count()
    device = kind(device, gpus)
    if device == "cuda" and gpus and not brings_ranks(engine):
        return f"cuda:{rank % gpus}"
    return device
