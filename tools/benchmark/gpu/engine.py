"""The measured engine with its trainer, and the floor: the GPU copying within its own memory."""

from __future__ import annotations

import contextlib
import time

import torch

from tools.benchmark.figures import Setting
from tools.benchmark.weights import fleets
from tools.benchmark.weights.fleets import Running
from tools.benchmark.weights.shapes import ONE_LAYER, QWEN3_4B

DEVICE = "cuda"


def beside_trainer(setting: Setting) -> contextlib.AbstractContextManager[Running]:
    """Return a shared fleet with one engine of one rank on the trainer's GPU."""
    return fleets.running(setting, ONE_LAYER if setting.quick else QWEN3_4B, engines=1, device=DEVICE)


def copied_s(tensors: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    """Return the seconds to copy every tensor into its target, device and host idle before and after."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for tensor, target in zip(tensors, targets, strict=True):
        target.copy_(tensor)
    torch.cuda.synchronize()
    return time.perf_counter() - started
