"""Generates samples for a trainer, at the stages without a proxy, over pauses, updates and failures.

Decides when a cut sample continues, how many samples run at a time, and how often a request is repeated after a
failure. Which stage generates is decided in rollout.picking.

Imports: rollout.picking, client, contract, runtime, transport.

Start with ``rollout.py`` (``AsyncRollout.generate_batch``; ``AsyncRollout._attempts`` sends and repeats the requests of
one sample), ``dispatch.py`` (``Dispatch.attempt`` waits for a stage) and ``continuation.py`` (``Progress``: one sample
over several requests). ``stage_stream.py`` is the stream to one stage. ``forwarding.py`` picks stages for requests that
the gateway sends itself, and ``running.py`` stops requests by name.
"""
