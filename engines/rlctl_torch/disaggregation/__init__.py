"""KV entries between a prefill and a decode engine: messages about one request, and segments that carry its entries.

Imports: rlctl_torch.model, rlctl_torch.steps, rlctl.contract, rlctl.weights.

Start with ``bootstrap.py`` (``Rooms``) and ``kv_handover.py`` (``Handovers``).
"""
