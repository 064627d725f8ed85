"""The command stream without a transport: both halves, used from coordinator to stage and from rank 0 to follower.

Decides when a peer counts as silent. Decides how much of a command's time the sender reserves for the return of the
result (``commander.taken_along``). A command runs at most once, and each result is matched to a command.

Imports: contract, ports, engine, runtime.

Start with ``commander.py`` (``Commander.issue``: the sending half) and ``executor.py`` (``Executor.serve``: the
receiving half, with the recorded results). The messages are in ``protos/rlctl/v1/control.proto``.
"""
