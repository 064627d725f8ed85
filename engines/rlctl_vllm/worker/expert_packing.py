"""Packing of expert weights on a CPU, which vLLM does at the first load only.

On a CPU the kernel of unquantised experts computes with packed weights. vLLM 0.32 packs when the kernel is made
(``fused_moe/unquantized_fused_moe_method.py``), and skips that step on every later load: the kernel then reads plain
weights as packed weights. This module does the skipped step. Other devices and methods are unchanged; the trial at the
start (:mod:`rlctl_servers.updates.reload_trial`) shows which of these repeat a load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def repack_on_reload(model: Any, device: torch.device) -> None:
    """Make every later load of the model's experts end with their packing."""
    if device.type != "cpu":
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and not isinstance(_step(method), partial):
            method.process_weights_after_loading = partial(_process, method, _step(method))


def _step(method: Any) -> Callable[[Any], None]:
    step: Callable[[Any], None] = method.process_weights_after_loading
    return step


def _process(method: Any, process: Callable[[Any], None], layer: Any) -> None:
    """Process a layer after a load, and pack its weights unless vLLM has packed."""
    if method.moe_kernel is None:
        process(layer)  # a first load, which packs
        return
    experts = method.moe_kernel.fused_experts
    pack, packed = experts.process_weights_after_loading, False

    def noticed(layer: Any) -> None:
        nonlocal packed
        packed = True
        pack(layer)

    experts.process_weights_after_loading = noticed
    try:
        process(layer)
    finally:
        del experts.process_weights_after_loading
    if not packed:
        pack(layer)
