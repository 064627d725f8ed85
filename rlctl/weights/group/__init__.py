"""Process groups between a source and the ranks that it feeds: formed, used, interrupted, left.

Decides how members meet within a limited time, how a blocked collective is ended, and which groups a rank is a member
of.

Imports: weights.tensor, contract.

Start with ``process_group.py`` (``WeightGroup.broadcast``, ``join``) and ``rendezvous.py`` (``Forming``).
``rank_groups.py`` keeps the groups of one rank, ``sender.py`` sends an update over a group,
``tcp_connections.py`` cuts its connections.
"""
