"""Calls to the coordinator: connection, admin verbs, watched fleet.

Decides the calls that are retried under the same request id, the exception for each error on the wire, and the moment
at which a drained stage is idle.

Imports: contract, ports, transport.

Start with ``connection.py`` (``Connection.call``), ``admin.py`` (``AsyncAdmin``: the verbs) and ``fleet_watch.py``
(``FleetView``). ``AsyncAdmin.drain`` makes the coordinator disable stages, and polls the stages until all are idle.
Users import from ``rlctl`` or ``rlctl.sdk``.
"""
