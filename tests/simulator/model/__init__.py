"""What a slot's engine can do, and what one rank holds: weights as names with contents.

Imports: tests.simulator.ports, rlctl.contract.

Start with ``profiles.py`` (``SimSlot``) and ``rank_weights.py`` (``Holding``).
"""
