"""The coordinator: one fleet with operations and weight updates.

``service.py`` holds the RPCs as methods of ``Coordinator``; ``server.py`` is the process. The packages, from
bottom to top: journal, fleet, operations, pauses, transaction, healing, updates, verbs. Each package may import
earlier packages.

``audit.py`` records changes and callers; ``subjects.py`` finds the models of a request, for the scopes of the
caller. ``maintenance.py`` verifies, restores and compacts journals while no coordinator runs.

Only ``server.py``, ``maintenance.py`` and ``journal`` import gRPC or SQLite. All other code runs on the ports of
``rlctl/ports.py``, so that the simulation can replace network, disk and clock.

Imports: contract, ports, command_stream; ``server.py`` also transport.

Start with ``service.py``: ``Coordinator.verb`` for any admin verb (``verbs`` has its route),
``Coordinator.begin_weight_update`` for an update, ``Coordinator._take_over`` for the epoch.
"""
