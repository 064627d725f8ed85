"""The trainer's side of an update: the publisher, its lead and its members.

Decides which tensors are sent, over which path, in which order the buckets of all sources are sent, and when a further
attempt starts. weights.tensor decides which tensors share a bucket.

Imports: client, weights, contract, ports, runtime, transport.

Start with ``publisher.py`` (``AsyncPublisher.update``). ``lead.py`` (``Leading.run``) runs the update at trainer rank
0; ``member.py`` follows the update at the other ranks, over the streams of ``member_streams.py``. ``source_rank.py``
sends the tensors of one trainer rank in an attempt. ``bucket_plan.py`` compares the tensors with the reference, and
puts the buckets of all sources in one order (``in_one_order``). ``progress_reports.py`` calls the trainer's progress
function. ``model_digest.py`` digests a trainer's weights for a comparison. ``mismatch_report.py`` (``blame_ranks``)
names the ranks with wrong parts after a failed verification.
"""
