"""Operations: accepted once, journaled before the first command, one outcome for each target.

Decides whether a request is new or a repeat, and vets each stage result before it counts: a stale or malformed
answer becomes UNKNOWN in ``fanout.py`` (``Fanout._vetted``).

Imports: coordinator.fleet, coordinator.journal, contract, ports.

Start with ``operations.py`` (``Operations.start``) and ``fanout.py`` (``Fanout.run``). ``collective_fanout.py``
is the fan-out in which ranks wait for each other. ``call_coalescing.py`` joins equal calls for single engines;
``idempotency_keys.py`` exchanges callers' keys for request ids.
"""
