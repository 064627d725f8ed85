"""Verbs that change the fleet's record as well as its stages: pause and continue by name.

Decides when a pause by name is in force, that a pause which not every target took is taken back, when a pause
ends by its ``ttl``, and what a continue means for a stage that is asleep.

Imports: coordinator.operations, coordinator.fleet, contract, ports.

Start with ``pause.py`` (``Pausing.pause``). All other verbs need no code here: ``Coordinator.verb`` sends them
as they are.
"""
