"""GPUs of this machine, and which of them ranks compute on. No library is loaded that would touch a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlctl.engine import brings_ranks


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


def kind(device: str, gpus: int) -> str:
    """``device``, with "auto" replaced by "cuda" on a machine with GPUs and by "cpu" elsewhere."""
    if device == "auto":
        return "cuda" if gpus else "cpu"
    return device


def of_process(device: str, engine: str, rank: int) -> str:
    """The device of a process that is started by hand on this machine: "cpu", "cuda:N", or "cuda" for an engine with
    rank processes of its own.

    Ranks of other engines take the GPUs of a machine in order. The ranks of a second machine start at its first GPU,
    and so does a process that sees one GPU only.
    """
    gpus = gpu_count()
    device = kind(device, gpus)
    if device == "cuda" and gpus and not brings_ranks(engine):
        return f"cuda:{rank % gpus}"
    return device
