"""Weight updates at a server: the open update, checkpoints that it may load, labels, the trial of loads.

Imports: rlctl_servers.requests, rlctl.engine, rlctl.contract, rlctl.weights.

Start with ``checkpoints.py`` (``Checkpoints``) and ``reload_trial.py`` (``trial``).
"""
