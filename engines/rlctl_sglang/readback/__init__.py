"""The full tensors that SGLang's ranks hold, read back: for digests, mismatches and sending to other stages.

Decides which part of which checkpoint tensor each fused parameter is, and proves it by checksums.

Imports: rlctl_sglang.server, rlctl_sglang.requests, rlctl_servers, rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``readback.py`` (``Readback``) and ``parameter_layout.py`` (``find_out``, pure).
"""
