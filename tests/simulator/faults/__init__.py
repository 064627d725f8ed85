"""The faults of a seed: at a time, or at a step of the protocol.

Imports: tests.simulator.processes, tests.simulator.callers, tests.simulator.ports, rlctl.contract, rlctl.ports.

Start with ``faults.py`` (``Faults``) and ``protocol_step_faults.py`` (``Trap``).
"""
