"""The command stream without a transport: both halves, used from coordinator to stage and from rank 0 to follower.

Decides when a peer counts as silent, and which part of a command's time its sender keeps for the way of the answer
(``commander.taken_along``). A command runs at most once, and each result is matched to its command.

Imports: contract, ports, engine, runtime.

Start with ``commander.py`` (``Commander.issue``: the sending half) and ``executor.py`` (``Executor.serve``: the
receiving half; it keeps the recorded results). The messages are in ``protos/rlctl/v1/control.proto``.
"""
