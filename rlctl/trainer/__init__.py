"""The trainer's side of an update: the publisher, its lead and its members.

Decides which tensors are sent, in which buckets and order, over which path; when another attempt is worth it;
and what the caller learns of the result.

Imports: client, weights, contract, ports, runtime, transport.

Start with ``publisher.py`` (``AsyncPublisher.update``). ``lead.py`` (``Leading.run``) runs the update at
trainer rank 0; ``member.py`` follows it at the other ranks, over the streams of ``member_streams.py``.
``source_rank.py`` is what each rank does in an attempt; ``bucket_plan.py`` fits the tensors to the reference.
"""
