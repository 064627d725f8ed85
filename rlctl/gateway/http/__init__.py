"""HTTP parts that all dialects share: calls, bodies, routes, tables of fields, errors, identity, middleware.

Decides the limits of a body, the request id of a call, what happens when its caller disconnects, and how an
engine's address is written (``/engines/SLOT``).

Imports: gateway.backend, sdk, contract, ports, runtime.

Start with ``call.py`` (``Call.operate`` runs a verb for a caller), ``dialect.py`` (``Route``, ``Scope``) and
``table.py`` (``Row``: fields that are read, documented and described in OpenAPI from one table).
"""
