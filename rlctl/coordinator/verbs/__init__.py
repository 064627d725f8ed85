"""Pause and continue by name: the verbs that change the fleet's record as well as its stages.

Decides when a pause by name is in force, when it ends by its ``ttl``, and when a stage that is asleep continues. If a
target does not confirm a pause, the operation fails, and the stages that it has paused continue. A target is REJECTED
if a continue has ended its pause in the meantime.

Imports: coordinator.operations, coordinator.fleet, contract, ports.

Start with ``pause.py`` (``Pausing.pause``). A verb that changes only stages has no code here: ``Coordinator.verb`` in
``coordinator/service.py`` fans it out.
"""
