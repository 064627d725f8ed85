"""The open updates of all models: begun, owned under a lease, written, ended.

Decides who may begin an update, whether the caller owns it, and when its lease ends. For a write without an update id,
decides which update it belongs to.

Imports: coordinator.healing, coordinator.transaction, coordinator.operations, coordinator.fleet, contract,
ports.

Start with ``manager.py`` (``Updates.begin``, ``Updates.renew``, ``Updates.commit``; ``Graces`` has the waits).
``from_disk.py`` is an update in one call; ``implicit.py`` serves clients that do not name updates, and
``written_tensors.py`` has the tensors that they wrote; ``group_formation.py`` forms one group from calls for single
engines.
"""
