"""The capabilities of a slot's engine, and the weights at a rank, as names with contents.

Imports: tests.simulator.ports, rlctl.contract.

Start with ``profiles.py`` (``SimSlot``) and ``rank_weights.py`` (``Holding``).
"""
