"""SGLang-Omni's HTTP API: its router, its workers, its admin key.

Imports: gateway.generation, gateway.backend, gateway.http, contract.

Start with ``dialect.py``, then ``requests.py`` (``carry_out``) and ``replies.py``.
"""
