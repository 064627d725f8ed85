"""The tensor data plane: how weights are described, digested, read, sent and placed.

The trainer's publisher and the engines are built on these packages, which know neither gRPC nor the coordinator. Most
of their modules import torch; import them only where tensors are handled.

Packages, from bottom to top: tensor, checkpoint, group, shards, formats, versions; shared_memory uses the
receiver.

Imports: contract.

Start with ``receiver.py`` (``Receiver.receive``): it takes the buckets of an update and places each tensor
through ``shards/shard_map.py`` (``ShardMap.place``). The sending side is ``group/sender.py`` and
``shared_memory/sender.py``.
"""
