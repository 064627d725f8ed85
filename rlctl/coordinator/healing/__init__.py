"""Healing: bring single stages to the published version without the trainer.

Decides which stage needs a heal, when the heal is due, and which checkpoint or stage is its source. Also decides when
the first weights of a stage are compared with a keyed digest, and how orphans of ended updates are cleared at a stage.

Imports: coordinator.transaction, coordinator.pauses, coordinator.operations, coordinator.fleet, contract, ports.

Start with ``healer.py`` (``Healer.look`` notices a stage, ``Healer.heal`` runs) and ``sources.py`` (``needs_heal``;
``Sources.of``: the checkpoint or stage, or the reason why there is no heal source; ``Sources.obtainable``: the same for
adapters). ``first_weights.py`` compares the weights of a new process with a version that has a keyed digest.
``from_peer.py`` copies weights from another stage. ``orphans.py`` (``Orphans.look``) clears orphans.
"""
