"""Single tensors: names, dtypes, slices, digests, buckets, and the weights that a trainer may pass.

Decides the digest of a tensor and of a model, which tensors travel together, how module parameters map to
checkpoint names, and which names are unknown or tied.

Imports: contract.

Start with ``tensors.py`` (``TensorMeta``), ``digest.py`` (``tensor_digest``, ``ModelDigest``), ``buckets.py``
(``plan``: which tensors share a bucket) and ``source.py`` (``WeightSource``). ``placement.py`` has the identities
of hosts and devices.
"""
