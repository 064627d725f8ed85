"""The production state machines on a virtual clock, under faults that a seed draws, and the promises checked.

Only the ports of :mod:`rlctl.ports` and :class:`rlctl.engine.Engine` are replaced: links, clock, journal, engine. What
runs between them is the coordinator, the stages and the workers as they are shipped. ``tools/simulate`` runs it.
"""
