"""Operations: accepted once, journaled before the first command, one outcome for each target.

Decides whether a request is new or a repeat, and which outcome a target has when its result cannot be used. In
``fanout.py`` a target becomes UNKNOWN if its result does not come by the deadline (``Fanout._late``). So does a target
whose result has a wrong incarnation or epoch, or contradicts the results of its ranks (``Fanout._vetted``).

Imports: coordinator.fleet, coordinator.journal, contract, ports.

Start with ``operations.py`` (``Operations.start``; ``Operations.known``: the run of a repeated request id), ``run.py``
(``Run``: an accepted operation and its results) and ``fanout.py`` (``Fanout.run``). When a coordinator restarts,
``Operations.load`` deletes the records of open updates and ends running operations as UNKNOWN.
``collective_fanout.py`` is the fan-out in which ranks wait for each other. ``call_coalescing.py`` joins equal calls for
single engines; ``idempotency_keys.py`` exchanges callers' keys for request ids.
"""
