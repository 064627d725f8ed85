"""Shared code of the plug-ins for engine servers (SGLang, vLLM), which are separate programs driven over HTTP.

``engine.py`` (``ServerEngine``) has the lifecycle of such an engine and the check whether a verb can run. Packages:
server, requests, updates, adapters, ranks (code inside the ranks of the engine).

Imports: rlctl.engine, rlctl.contract, rlctl.runtime, rlctl.weights.

Start with ``engine.py``, then ``server/server.py`` (launched or attached) and ``requests/requests.py``.
"""
