"""The parts of full tensors at the ranks of one stage.

Decides the place of a tensor at a rank, and the model digest of a stage for any layout.

Imports: weights.group, weights.checkpoint, weights.tensor, contract.

Start with ``shard_map.py``. ``ShardMap.place`` copies a rank's part into place. The function ``model_digest``, called
by all ranks together, digests by SHA-256 or with a key; CheckWeights calls it in
``engines/rlctl_torch/verbs/check_weights.py`` and ``engines/rlctl_servers/ranks/checks.py``. ``load_hooks.py`` has the
hooks that an engine runs before and after a load; ``gather.py`` gathers full tensors from the ranks; ``mismatch.py``
names the tensor that differs, and digests the parts, by which ``trainer/mismatch_report.py`` names the ranks.
"""
