"""SGLang's HTTP API, also used by Miles and slime.

Imports: gateway.generation, gateway.backend, gateway.http, contract, runtime.

Start with ``weights.py`` (``ROWS``: updates and groups; ``from_distributed``: a broadcast of tensors). The other rows
are in ``admin.py`` (pauses, caches, memory), ``adapters.py`` (LoRA) and ``reads.py`` (information). ``dialect.py``
joins the rows; ``replies.py`` has the form of responses. ``checkpoint_engine.py`` replies to the ZeroMQ sockets of
parameter servers. For a write that names no update, the coordinator opens an update:
``coordinator/updates/implicit.py`` (``Implicit.run``).
"""
