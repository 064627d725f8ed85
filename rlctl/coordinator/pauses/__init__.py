"""Pauses and continues by name: they change the fleet's record as well as stages.

Decides when a pause by name is in force, when the ``ttl`` ends it, and when a stage that is ASLEEP continues. If a
target does not confirm a pause, the operation fails, and the stages that have paused continue. A target is REJECTED
if a continue has ended the pause in the meantime.

Imports: coordinator.operations, coordinator.fleet, contract, ports.

Start with ``pause.py`` (``Pausing.pause``).
"""
