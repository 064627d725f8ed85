"""Samples for a trainer: continued over pauses, updates and failures, requested from the stages without a proxy.

Decides when a cut sample continues, how many samples run at a time, and what a failure costs. Which stage
generates is decided in rollout.picking.

Imports: rollout.picking, client, contract, runtime, transport.

Start with ``rollout.py`` (``AsyncRollout.generate_batch``), ``dispatch.py`` (``Dispatch``: waits for a stage,
sends the request) and ``continuation.py`` (``Progress``: one sample over several requests). ``stage_stream.py``
is the stream to one stage.
"""
