"""Pause and continue by name: the verbs that change the fleet's record as well as its stages.

Decides when a pause by name is in force, when it ends by its ``ttl``, and when a stage that is asleep continues. A
pause is taken back if a target does not confirm it. A pause that a continue ends while it runs is not OK.

Imports: coordinator.operations, coordinator.fleet, contract, ports.

Start with ``pause.py`` (``Pausing.pause``). Verbs that change stages only have no code here: ``Coordinator.verb`` in
``coordinator/service.py`` fans them out.
"""
