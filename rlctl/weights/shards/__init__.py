"""The parts of full tensors at the ranks of one stage.

Decides where a tensor is placed at a rank, the model digest of a stage for any layout, and which rank holds a
wrong part.

Imports: weights.group, weights.checkpoint, weights.tensor, contract.

Start with ``shard_map.py`` (``ShardMap.place``, ``model_digest``). ``load_hooks.py`` has the hooks that an engine runs
before and after a load; ``gather.py`` gathers full tensors from the ranks; ``mismatch.py`` names the tensor that
differs.
"""
