"""Healing: bring single stages to the published version without the trainer.

Decides which stage needs a heal, when it is due, from which checkpoint or stage, and what becomes of an update
that no coordinator owns any more.

Imports: coordinator.transaction, coordinator.verbs, coordinator.operations, coordinator.fleet, contract, ports.

Start with ``healer.py`` (``Healer.look`` notices a stage, ``Healer.heal`` runs) and ``sources.py``
(``needs_heal``; ``Sources.of``: the checkpoint or stage, or the reason why there is none; ``Sources.obtainable``: the
same for adapters). ``from_peer.py`` copies weights from another stage; ``orphans.py`` ends orphaned updates.
"""
