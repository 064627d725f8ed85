"""Whole fleets on a virtual clock, under faults drawn from a seed, with the promises checked.

Coordinator, stages and workers are the production code. Only the ports and the engine are replaced. Packages:
ports, model, engine, processes, callers, faults.

Imports: rlctl.coordinator, rlctl.stage, rlctl.worker, rlctl.command_stream, rlctl.contract, rlctl.ports,
rlctl.runtime.

Start with ``scenario.py`` (``Seed``: the course of one seed) and ``oracle.py`` (``Observer``: the invariants).
``mutants.py`` switches safeguards off; ``shrink.py`` reduces a failing seed; ``runner.py`` runs one.
"""
