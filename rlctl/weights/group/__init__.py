"""Process groups between a source and the ranks that it feeds: form, broadcast, interrupt, leave.

Decides the rendezvous within a limited time, the end of a blocked collective, and the groups of a rank.

Imports: weights.tensor, contract.

Start with ``process_group.py`` (``WeightGroup.broadcast``, ``join``) and ``rendezvous.py`` (``Forming``).
``rank_groups.py`` keeps the groups of one rank, ``sender.py`` sends an update over a group, ``tcp_connections.py`` cuts
the connections of a group.
"""
