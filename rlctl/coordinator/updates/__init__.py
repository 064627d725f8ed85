"""The open updates of all models: begin, lease, writes, end.

Decides which caller may begin an update, whether a caller is the owner (``Updates._own``), and when the update lease
ends. For a write without an update id, decides which update the write belongs to.

Imports: coordinator.healing, coordinator.transaction, coordinator.operations, coordinator.fleet, contract, ports.

Start with ``manager.py`` (``Updates.begin``, ``Updates.renew``, ``Updates.commit``; ``Graces`` has the waits).
``from_disk.py`` is an update in a single call; ``implicit.py`` serves clients that do not name updates, and
``written_tensors.py`` has the tensors that they wrote; ``group_formation.py`` forms a group from calls for single
engines.
"""
