"""rlctl inside the processes of other projects, under their names: slime, SkyRL, verl, vLLM's weight transfer.

Decides how a name of the other project maps to the SDK. Each module states the project's version for which the module
was written.

Imports: sdk, trainer, rollout, weights, launch.supervisor, engine, contract, runtime.

Start with ``slime.py``; ``child_fleet.py`` runs ``rlctl up`` as a child of a trainer. HTTP interfaces of other projects
are in gateway.dialects.
"""
