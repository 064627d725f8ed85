"""Names the tensor that differs from the sent tensor, and the digest of each rank's part.

A stage digests full tensors. A rank with a part of a differing tensor digests its part alone. The source has the full
tensor, digests the same part, and so finds the rank with the wrong part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlctl.contract.fingerprints import SIZE, differing, fingerprints
from rlctl.v1.verbs_pb2 import TensorDifference, TensorPart
from rlctl.weights.shards.shard_map import ModelDigestResult, ShardMap
from rlctl.weights.tensor.digest import part_digest
from rlctl.weights.tensor.slices import Shard, Slice
from rlctl.weights.tensor.tensors import TensorMeta


def difference(shards: ShardMap, result: ModelDigestResult, expected: bytes, key: bytes = b"") -> TensorDifference:
    """Report the stage's tensors that differ from the fingerprints, and this rank's part of the first difference."""
    names = differing(result.every, expected)
    report = TensorDifference(tensors=len(result.every), count=len(names))
    if not names:
        return report
    report.first = names[0]
    shard = shards.shards.get(names[0])
    if shard is None:
        return report
    part = report.part
    part.name = names[0]
    part.digest = part_digest(shard, key)
    if shard.slice.whole(shard.meta.shape):
        at = SIZE * sorted(result.every).index(names[0])
        part.differs = fingerprints({names[0]: part.digest}) != expected[at : at + SIZE]
    else:
        assert shard.slice.dim is not None
        part.dim, part.start, part.length = shard.slice.dim, shard.slice.start, shard.slice.length
    return report


def digest_parts(
    name: str, full: torch.Tensor, parts: Sequence[TensorPart], dtype: torch.dtype, key: bytes = b""
) -> list[TensorPart]:
    """Return the entries of ``parts`` for this tensor, with the digests that they must have.

    ``dtype`` is the reference's. Raises FIELD_INVALID for a part outside the tensor's shape.
    """
    digested = []
    for part in parts:
        if part.name != name:
            continue
        slice_ = Slice(part.dim, part.start, part.length) if part.HasField("dim") else Slice()
        answer = TensorPart()
        answer.CopyFrom(part)
        meta = TensorMeta(name, dtype, tuple(full.shape))
        answer.digest = part_digest(Shard(meta, slice_.of(full), slice_), key)
        digested.append(answer)
    return digested
