"""Code inside the ranks of an engine server: groups, segments, loading, what the ranks hold, digests.

``rank.py`` (``Rank``) carries the steps of an update out. ``model.py`` (``RankModel``) is its port to an engine's
model. Two shard maps are in the same module: ``LoaderMap`` gives tensors to the engine's loaders, ``MemoryMap``
writes them into the parameters. ``endpoint.py`` (``Endpoint``) turns messages into calls and errors into answers; the
stage server's side of it is ``RankCalls`` in ``engines/rlctl_servers/updates/rank_calls.py``. ``staged_update.py``
(``StagedUpdate``) has the steps of a staged update, which run in the thread of ``background.py``, into the memory of
``shadow_copy.py``. ``element_layout.py`` (``find_layout``) finds where each element of a checkpoint lies, by loading;
``element_codes.py`` and ``element_regions.py`` are its arithmetic.

Imports: rlctl.contract, rlctl.weights. No HTTP, no gRPC: the engine's environment has torch, numpy and protobuf.

Start with ``endpoint.py``, then ``rank.py``.
"""
