"""Weight updates at a server: the open update, checks of checkpoints, labels, the trial of loads.

Imports: rlctl_servers.ranks (its protocol), rlctl_servers.requests, rlctl_servers.server, rlctl.engine, rlctl.contract,
rlctl.weights.

Start with ``updates.py`` (``Updates``) and ``rank_calls.py`` (``RankCalls``), then ``checkpoints.py`` (``Checkpoints``)
and ``reload_trial.py`` (``trial``).
"""
