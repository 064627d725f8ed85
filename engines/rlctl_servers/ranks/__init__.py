"""Code inside the ranks of an engine server: groups, segments, loading, weights, digests.

``rank.py`` (``Rank``) carries out the steps of an update. ``model.py`` (``RankModel``) is its port to an engine's
model, with two shard maps: ``LoaderMap`` gives tensors to the engine's loaders, ``MemoryMap`` writes them into the
parameters. ``endpoint.py`` (``Endpoint``) turns messages into calls and errors into answers; the stage server's side is
``RankCalls`` in ``engines/rlctl_servers/updates/rank_calls.py``. ``staged_update.py`` (``StagedUpdate``) has the steps
of a staged update. These run on the thread of ``background.py``, into the memory of ``shadow_copy.py``.
``element_layout.py`` (``find_layout``) finds the place of each element of a checkpoint by loading; ``element_codes.py``
and ``element_regions.py`` are its arithmetic.

Imports: rlctl.contract, rlctl.weights. No HTTP, no gRPC: the engine's environment has torch, numpy and protobuf.

Start with ``endpoint.py``, then ``rank.py``.
"""
