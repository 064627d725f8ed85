"""The model at one rank: loaded, cut over the ranks, with attention, KV cache, experts, LoRA and shadow copy.

Imports: rlctl_torch.steps, rlctl.contract, rlctl.weights.

Start with ``model.py`` (``build``) and ``tensor_parallel.py`` (``cut``).
"""
