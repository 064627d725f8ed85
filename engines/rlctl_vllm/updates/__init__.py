"""Weight updates of vLLM: prepare, write and commit through the extension, from disk, or over vLLM's own NCCL engine.

Imports: rlctl_vllm.state, rlctl_servers, rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``updates.py`` (``Updates``) and ``worker_calls.py`` (``Workers``: calls to the extension at every
rank).
"""
