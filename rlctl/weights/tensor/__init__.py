"""Names, dtypes, slices, digests and buckets of tensors, and the weights that a trainer passes.

Decides the digest of a tensor and of a model, the contents of each bucket, the checkpoint names of module parameters,
and the unknown and tied names.

Imports: contract.

Start with ``tensors.py`` (``TensorMeta``), ``digest.py`` (``tensor_digest``, ``ModelDigest``: digests by SHA-256 or
with a key), ``keyed_digest.py`` (``keyed_sums``: the arithmetic of keyed digests), ``buckets.py`` (``plan``: tensors to
buckets) and ``source.py`` (``WeightSource``). ``placement.py`` has the identities of hosts and devices.
"""
