"""The command stream without a transport: both halves, used from coordinator to stage and from rank 0 to follower.

Decides that a command runs at most once, that each result is matched to its command, when a peer counts as
silent, and how much time each hop keeps for its own answer (``commander.taken_along``).

Imports: contract, ports, engine, runtime.

Start with ``commander.py`` (``Commander.issue``: the sending half) and ``executor.py`` (``Executor.serve``: the
receiving half; it keeps the recorded results). The messages are in ``protos/rlctl/v1/control.proto``.
"""
