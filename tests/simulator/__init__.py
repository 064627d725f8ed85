"""Whole fleets on a virtual clock, under faults drawn from a seed, with the promises checked.

Coordinator, stages and workers are the production code. Only the ports and the engine are replaced. Packages: ports,
model, engine, processes, callers, faults.

Imports: rlctl.coordinator, rlctl.stage, rlctl.worker, rlctl.command_stream, rlctl.contract, rlctl.ports, rlctl.runtime.

Start with ``scenario.py`` (``Seed``: the course of a seed). ``oracle.py`` judges the reports of the processes, and
``inspection.py`` (``look``) the weights that the stages would serve. Both record violations by ``Observer.broken``.
``mutants.py`` (``MUTANTS``, ``without``) switches safeguards off, as does ``tools/simulate --break NAME``. A mutant
with an empty list switches off a rule of the simulated engine: the engine checks the mutant's name. ``runner.py`` runs
a seed; ``shrink.py`` reduces a failing seed.
"""
