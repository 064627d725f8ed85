"""Weight updates of SGLang: prepare, write and commit as SGLang's sessions; groups, tensors, adapters.

Imports: rlctl_sglang.server, rlctl_servers, rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``updates.py`` (``Updates``) and ``groups.py`` (``Groups``).
"""
