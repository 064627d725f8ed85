"""Processes on a Ray cluster: one actor for each server, one placement group for each engine.

Decides on which nodes an engine runs (``node_choice.py``, pure). Ray restarts nothing; rlctl restarts engines.

Imports: launch.local, launch.interface, weights.group (addresses of interfaces), contract, runtime, transport.

Start with ``launcher.py`` (``RayLauncher``) and ``actor.py`` (``ServerActor``). ``given_placement_group.py``
uses a group that a trainer has made.
"""
