"""The command stream, transport-free: the commanding half and the commanded half, used on both hops.

Coordinator → stage and rank 0 → follower speak the same messages (``control.proto``). :class:`.commander.Commander`
issues commands over a link and matches results; :class:`.executor.Executor` carries them out at most once.
"""
