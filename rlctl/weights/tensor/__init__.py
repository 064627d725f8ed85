"""Single tensors: names, dtypes, slices, digests, buckets, and the weights that a trainer may pass.

Decides the digest of a tensor and of a model, which tensors travel together, how module parameters map to
checkpoint names, and which names are unknown or tied.

Imports: contract.

Start with ``tensors.py`` (``TensorMeta``), ``digest.py`` (``tensor_digest``, ``ModelDigest``: digests by SHA-256 or
with a key), ``keyed_digest.py`` (``keyed_sums``: the arithmetic of keyed digests), ``buckets.py`` (``plan``: which
tensors share a bucket) and ``source.py`` (``WeightSource``). ``placement.py`` has the identities
of hosts and devices.
"""
