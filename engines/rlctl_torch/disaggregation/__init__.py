"""KV entries between a prefill and a decode engine: where they meet, and the segments that carry the entries.

Imports: rlctl_torch.model, rlctl_torch.steps, rlctl.contract, rlctl.weights.

Start with ``bootstrap.py`` (``Rooms``) and ``kv_handover.py`` (``Handovers``).
"""
