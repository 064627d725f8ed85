"""HTTP parts that all dialects share: calls, bodies, routes, tables of fields, errors, identity, middleware.

Decides the limits of a body, the request id of a call, the effect of a caller's disconnection, and the form of engine
URLs (``/engines/SLOT``).

Imports: gateway.backend, sdk, contract, ports, runtime.

Start with ``call.py`` (``Call.operate`` runs a verb for a caller), ``dialect.py`` (``Route``, ``Scope``) and
``table.py`` (``Row``: a table of fields reads bodies and is the source of documentation and OpenAPI).
"""
