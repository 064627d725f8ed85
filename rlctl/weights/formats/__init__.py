"""Formats of weights beyond plain tensors: block-fp8 checkpoints and LoRA adapters.

Decides which tensors such a checkpoint or adapter must contain, and how a bf16 tensor becomes codes and scales.

Imports: weights.checkpoint, weights.tensor, contract.

Start with ``block_fp8.py`` (``BlockFp8``, a weight source) and ``lora.py`` (``expected``, ``open_adapter``).
"""
