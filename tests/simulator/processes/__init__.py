"""The simulated processes around the production state machines: coordinator and stages, and the stage in each slot.

Imports: tests.simulator.engine, tests.simulator.model, tests.simulator.ports, rlctl.contract,
rlctl.coordinator, rlctl.stage, rlctl.worker, rlctl.command_stream.

Start with ``fleet.py`` (``Fleet``), ``coordinator.py`` and ``stage.py``.
"""
