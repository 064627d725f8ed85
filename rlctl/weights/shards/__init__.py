"""The parts of full tensors at the ranks of one stage.

Decides where a tensor is placed at a rank, the model digest of a stage for any layout, and which rank holds a
wrong part.

Imports: weights.group, weights.checkpoint, weights.tensor, contract.

Start with ``shard_map.py`` (``ShardMap.place``, ``model_digest``). ``load_hooks.py`` is what an engine does
before and after a load; ``gather.py`` puts full tensors together; ``mismatch.py`` names the tensor that
differs.
"""
