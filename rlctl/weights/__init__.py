"""The tensor data plane: description, digest, reading, transfer and placement of weights.

The trainer's publisher and the engines are built on these packages. The packages know neither gRPC nor the coordinator.
Most modules import torch, so other packages import them only to handle tensors.

Packages, from bottom to top: tensor, checkpoint, group, shards, formats, versions; shared_memory uses the receiver.

Imports: contract.

Start with ``receiver.py`` (``Receiver.receive``): the receiver of an update's buckets. A tensor that the rank holds
whole and that is sent alone is received into the parameter itself (``ShardMap.full_in_place``). Other full tensors are
received into a buffer, and ``shards/shard_map.py`` (``ShardMap.place``) copies the rank's part. The sending side is
``group/sender.py`` and ``shared_memory/sender.py``.
"""
