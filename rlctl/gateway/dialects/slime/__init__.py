"""slime's router: SGLang's dialect with a list of workers.

Imports: gateway.dialects.sglang, gateway.backend, gateway.http, contract.

Start with ``dialect.py`` (``dialect``, ``add_worker``).
"""
