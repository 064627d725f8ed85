"""The engine that is measured, its trainer beside it, and the floor: the GPU copying within its own memory."""

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
    """A fleet of one engine of one rank on the trainer's GPU, to be shared."""
    return fleets.running(setting, ONE_LAYER if setting.quick else QWEN3_4B, engines=1, device=DEVICE)


def copied_s(tensors: list[torch.Tensor], targets: list[torch.Tensor]) -> float:
    """Seconds in which every tensor is copied into its target, device and host idle before and after."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for tensor, target in zip(tensors, targets, strict=True):
        target.copy_(tensor)
    torch.cuda.synchronize()
    return time.perf_counter() - started
