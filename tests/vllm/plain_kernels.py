"""A plug-in of vLLM: on a CPU linear layers compute with their parameters, as on GPUs. vLLM would pack them."""

from __future__ import annotations

from typing import Any


def register() -> None:
    import torch
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep
