"""Shared code of the plug-ins for engine servers (SGLang, vLLM): programs of their own, driven over HTTP.

``engine.py`` (``ServerEngine``) is the life of such an engine and the check whether a verb can be done.
Packages: server, requests, updates, adapters, ranks (code inside the ranks of the engine).

Imports: rlctl.engine, rlctl.contract, rlctl.runtime, rlctl.weights.

Start with ``engine.py``, then ``server/server.py`` (launched or attached) and ``requests/requests.py``.
"""
