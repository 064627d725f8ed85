"""Formats of weights beyond plain tensors: block-fp8 checkpoints and LoRA adapters.

Decides the required tensors of such a checkpoint or adapter, and the codes and scales of a bf16 tensor.

Imports: weights.checkpoint, weights.tensor, contract.

Start with ``block_fp8.py`` (``BlockFp8``, a weight source) and ``lora.py`` (``expected``, ``open_adapter``).
"""
