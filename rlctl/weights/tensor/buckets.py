"""Assignment of tensors to buckets, and the byte layout of a packed bucket.

Small tensors are packed into one broadcast of bytes. A large tensor is broadcast alone, so that a receiver can write it
directly into place. A packed bucket holds the bytes of its tensors back to back. A gap is inserted only where a
tensor's offset would not be aligned to its dtype. SGLang's ``flattened_bucket`` knows no gaps and fails on exactly
these buckets. Every bucket without gaps has SGLang's layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from rlctl.contract.errors import Reason
from rlctl.v1 import verbs_pb2
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, by_name, dtype_name, parse_dtype

BUCKET_BYTES = 64 << 20
"""Maximum bytes of a packed bucket, unless an atomic list needs more."""

LARGE_BYTES = 4 << 20
"""A tensor of this size or more is a bucket of its own."""

_LARGEST = (1 << 63) - 1
"""Maximum of sizes and byte counts: torch has signed 64-bit numbers."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together.

    Attributes:
        sequence: position in the update, per source, from 0 without gaps.
        metas: the tensors, in order.
        flattened: packed into a broadcast of bytes; otherwise a broadcast for each tensor.
        parts: each broadcast has the sender's part of a tensor, for a receiver with the same part.
    """

    sequence: int
    metas: list[TensorMeta]
    flattened: bool
    parts: bool = False

    @cached_property
    def offsets(self) -> list[int]:
        """Offset of each tensor in the packed bucket, in bytes."""
        offsets = []
        end = 0
        for meta in self.metas:
            offsets.append(_aligned(end, meta))
            end = offsets[-1] + meta.nbytes
        return offsets

    @property
    def nbytes(self) -> int:
        """Bytes to send, with the gaps of a packed bucket."""
        if not self.flattened:
            return sum(meta.nbytes for meta in self.metas)
        return self.offsets[-1] + self.metas[-1].nbytes if self.metas else 0

    @property
    def broadcasts(self) -> list[int]:
        return [self.nbytes] if self.flattened else [meta.nbytes for meta in self.metas]


def plan(
    metas: Iterable[TensorMeta | Sequence[TensorMeta]],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    large_bytes: int = LARGE_BYTES,
) -> list[Bucket]:
    """Assign tensors to buckets, in order. An inner sequence is an atomic list.

    A tensor of ``large_bytes`` or more is a bucket of its own, as is a list with such a tensor; its tensors are sent
    one by one. Smaller tensors are packed up to ``bucket_bytes``; a larger list makes a larger bucket. A tensor that
    would need a gap starts a new bucket, so that SGLang can read the bucket. A large tensor does not end the packing.
    Buckets are ordered by their last tensors, and the order within a bucket is kept.

    Raises FIELD_INVALID for sizes below 1 or a repeated name.
    """
    if bucket_bytes < 1 or large_bytes < 1:
        raise Reason.FIELD_INVALID.error(f"no buckets of {bucket_bytes} bytes and {large_bytes} for large tensors")
    atomic_lists = [[entry] if isinstance(entry, TensorMeta) else list(entry) for entry in metas]
    by_name(meta for atomic_list in atomic_lists for meta in atomic_list)
    # Contents and format by the position of the last entry.
    closed: dict[int, tuple[list[TensorMeta], bool]] = {}
    packing: list[TensorMeta] = []
    end = last = 0
    for position, atomic_list in enumerate(atomic_lists):
        if any(meta.nbytes >= large_bytes for meta in atomic_list):
            closed[position] = (atomic_list, False)
            continue
        needs_gap = bool(atomic_list) and _aligned(end, atomic_list[0]) != end
        if packing and (needs_gap or _end(atomic_list, end) > bucket_bytes):
            closed[last] = (packing, True)
            packing, end = [], 0
        packing += atomic_list
        end, last = _end(atomic_list, end), position
    if packing:
        closed[last] = (packing, True)
    return [Bucket(sequence, *closed[position]) for sequence, position in enumerate(sorted(closed))]


def room_for(nbytes: int, buffer: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return a 1-d uint8 buffer of at least ``nbytes`` bytes on ``device``: ``buffer`` if it fits, or a new buffer."""
    if buffer is None or buffer.device != device or buffer.numel() < nbytes:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return buffer


def put(bucket: Bucket, index: int, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy the bytes of a tensor to its offset in the buffer of a packed bucket.

    Raises FIELD_INVALID if dtype or shape differ from the bucket's.
    """
    meta, start = bucket.metas[index], bucket.offsets[index]
    if tensor.dtype != meta.dtype or tuple(tensor.shape) != meta.shape:
        raise Reason.FIELD_INVALID.error(f"the bucket has {meta}, not {tensor.dtype} {tuple(tensor.shape)}")
    end = 0 if index == 0 else bucket.offsets[index - 1] + bucket.metas[index - 1].nbytes
    # The gap is zeroed: the broadcast must not reveal earlier contents of the memory.
    buffer[end:start].zero_()
    buffer[start : start + meta.nbytes].copy_(as_bytes(tensor))


def pack(bucket: Bucket, tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor | None = None) -> torch.Tensor:
    """Return the ``bucket.nbytes`` bytes of a packed bucket: 1-d, uint8, at the start of ``buffer`` if it fits.

    Raises FIELD_REQUIRED for a missing tensor, FIELD_INVALID for a different dtype or shape.
    """
    if missing := [meta.name for meta in bucket.metas if meta.name not in tensors]:
        raise Reason.FIELD_REQUIRED.error(f"tensors of bucket {bucket.sequence} are missing: {', '.join(missing)}")
    first = tensors[bucket.metas[0].name] if bucket.metas else torch.empty(0)
    packed = room_for(bucket.nbytes, buffer, first.device)[: bucket.nbytes]
    for index, meta in enumerate(bucket.metas):
        put(bucket, index, tensors[meta.name], packed)
    return packed


def unpack(bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a packed bucket, in order, as views of the buffer.

    Raises FIELD_INVALID unless the buffer is 1-d uint8 of at least ``bucket.nbytes`` bytes.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < bucket.nbytes:
        raise Reason.FIELD_INVALID.error(
            f"bucket {bucket.sequence} needs {bucket.nbytes} bytes, not {buffer.dtype} {tuple(buffer.shape)}"
        )
    return [
        (meta.name, buffer[start : start + meta.nbytes].view(meta.dtype).reshape(meta.shape))
        for meta, start in zip(bucket.metas, bucket.offsets, strict=True)
    ]


def to_proto(bucket: Bucket) -> verbs_pb2.TensorBucket:
    return verbs_pb2.TensorBucket(
        sequence=bucket.sequence,
        names=[meta.name for meta in bucket.metas],
        dtypes=[dtype_name(meta.dtype) for meta in bucket.metas],
        shapes=[verbs_pb2.Shape(dims=meta.shape) for meta in bucket.metas],
        format=(
            verbs_pb2.BUCKET_FORMAT_FLATTENED
            if bucket.flattened
            else verbs_pb2.BUCKET_FORMAT_PARTS
            if bucket.parts
            else verbs_pb2.BUCKET_FORMAT_TENSORS
        ),
    )


def from_proto(message: verbs_pb2.TensorBucket, field: str = "buckets[0]") -> Bucket:
    """Parse a bucket; ``field`` is the field of the message in the request.

    Raises FIELD_REQUIRED (no names), LENGTH_MISMATCH (names, dtypes and shapes differ in number), FIELD_INVALID (an
    empty or repeated name, an unknown dtype, a tensor above the size limit), UNKNOWN_ENUM_VALUE.
    """
    if not message.names:
        raise Reason.FIELD_REQUIRED.error("a bucket needs at least one tensor", field=f"{field}.names")
    if not len(message.names) == len(message.dtypes) == len(message.shapes):
        raise Reason.LENGTH_MISMATCH.error(
            f"{len(message.names)} names, {len(message.dtypes)} dtypes and {len(message.shapes)} shapes", field=field
        )
    if message.format not in verbs_pb2.BucketFormat.values():
        raise Reason.UNKNOWN_ENUM_VALUE.error(f"unknown bucket format {message.format}", field=f"{field}.format")
    metas = []
    for index, (name, dtype, shape) in enumerate(zip(message.names, message.dtypes, message.shapes, strict=True)):
        if not name:
            raise Reason.FIELD_INVALID.error("a tensor needs a name", field=f"{field}.names[{index}]")
        meta = TensorMeta(name, parse_dtype(dtype, f"{field}.dtypes[{index}]"), tuple(shape.dims))
        if max(meta.nbytes, *shape.dims, 0) > _LARGEST:
            raise Reason.FIELD_INVALID.error(
                f"{name}: no tensor has the shape {meta.shape}", field=f"{field}.shapes[{index}]"
            )
        metas.append(meta)
    by_name(metas, field=f"{field}.names")
    return Bucket(
        message.sequence,
        metas,
        flattened=message.format == verbs_pb2.BUCKET_FORMAT_FLATTENED,
        parts=message.format == verbs_pb2.BUCKET_FORMAT_PARTS,
    )


def _aligned(end: int, meta: TensorMeta) -> int:
    """Return the first offset from ``end`` on that is aligned to the tensor's dtype."""
    return -(-end // meta.dtype.itemsize) * meta.dtype.itemsize


def _end(metas: Sequence[TensorMeta], end: int) -> int:
    """Return the end of a packed bucket after these tensors are appended at ``end``."""
    for meta in metas:
        end = _aligned(end, meta) + meta.nbytes
    return end
