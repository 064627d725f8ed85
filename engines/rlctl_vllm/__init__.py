"""Real vLLM servers as engines: launched or attached to, driven over HTTP and by an extension inside their workers.

``engine.py`` (``VLLMEngine``) implements the Engine interface; ``state.py`` (``State``, pure) decides what vLLM
may be sent next. Packages: server, requests, updates; worker runs inside vLLM; sidecar is SGLang's interface in
front of one vLLM.

Imports: rlctl_servers, rlctl.engine, rlctl.contract, rlctl.weights. Nothing is imported here: a worker needs no
HTTP client.

Start with ``state.py``, then ``updates/worker_calls.py`` and ``worker/extension.py``.
"""
