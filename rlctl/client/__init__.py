"""Calls to the coordinator: connection, admin verbs, watched fleet.

Decides which calls are retried under the same request id, how an error on the wire becomes an exception, and when a
drained stage is idle.

Imports: contract, ports, transport.

Start with ``connection.py`` (``Connection.call``), ``admin.py`` (``AsyncAdmin``: the verbs) and ``fleet_watch.py``
(``FleetView``). ``AsyncAdmin.drain`` has the coordinator disable stages, and polls them until they are idle. Users
import from ``rlctl`` or ``rlctl.sdk``.
"""
