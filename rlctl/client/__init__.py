"""Calls to the coordinator: connection, admin verbs, watched fleet.

Decides which calls are retried under the same request id, and how an error on the wire becomes an exception.

Imports: contract, ports, transport.

Start with ``connection.py`` (``Connection.call``), ``admin.py`` (``AsyncAdmin``: the verbs) and
``fleet_watch.py`` (``FleetView``). Users import from ``rlctl`` or ``rlctl.sdk``.
"""
