"""Weight updates at one SGLang: calls to the plug-in in its ranks, adapters.

Imports: rlctl_sglang.server, rlctl_sglang.ranks (its channel), rlctl_servers, rlctl.engine, rlctl.contract.

Start with ``rank_calls.py`` (``Ranks``); the steps of an update are ``Updates`` in
``engines/rlctl_servers/updates/updates.py``.
"""
