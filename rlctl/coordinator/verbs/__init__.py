"""Pause and continue by name: the verbs that change the fleet's record as well as its stages.

Decides when a pause by name is in force, that a pause which not every target took is taken back, when a pause
ends by its ``ttl``, and what a continue means for a stage that is asleep.

Imports: coordinator.operations, coordinator.fleet, contract, ports.

Start with ``pause.py`` (``Pausing.pause``). Verbs that change stages only have no code here: ``Coordinator.verb`` in
``coordinator/service.py`` fans them out.
"""
