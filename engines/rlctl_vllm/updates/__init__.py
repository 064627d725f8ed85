"""Weight updates at one vLLM: calls to the extension at every rank, vLLM's own NCCL engine, adapters.

Imports: rlctl_servers, rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``worker_calls.py`` (``Workers``); the steps of an update are ``Updates`` in
``engines/rlctl_servers/updates/updates.py``.
"""
