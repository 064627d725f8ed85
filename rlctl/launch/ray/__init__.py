"""Processes on a Ray cluster: one actor for each server, one placement group for each engine.

Decides the nodes of an engine (``node_choice.py``, pure). Ray restarts nothing; rlctl restarts engines.

Imports: launch.local, launch.interface, weights.group (addresses of interfaces), contract, runtime, transport.

Start with ``launcher.py`` (``RayLauncher``) and ``actor.py`` (``ServerActor``). ``given_placement_group.py`` uses a
group made by a trainer.
"""
