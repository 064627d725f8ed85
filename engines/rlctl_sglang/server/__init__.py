"""The SGLang server: arguments, process, nodes, facts, memory regions, leftovers of a killed server.

Imports: rlctl_sglang.options, rlctl_sglang.state, rlctl_sglang.requests (limits), rlctl_servers, rlctl.engine,
rlctl.contract, rlctl.weights.

Start with ``process.py`` (``SGLangProcess``) and ``facts.py`` (``ask``).
"""
