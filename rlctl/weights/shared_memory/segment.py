"""Parsing and checks of a shared segment's message. Nothing is mapped here, no byte is read.

A message is not trusted. Refused before any mapping or write: names that are paths, sizes other than the file's, and
tensors that reach beyond the segment or overlap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.contract.durations import duration, seconds
from rlctl.contract.errors import Reason
from rlctl.contract.serialized_tensors.handles import CudaStorage, SharedStorage, check_cuda, shared_name
from rlctl.v1 import verbs_pb2
from rlctl.weights.shared_memory.posix import HEADER_BYTES, check_name
from rlctl.weights.tensor.buckets import Bucket
from rlctl.weights.tensor.tensors import TensorMeta, by_name, dtype_name, parse_dtype

CUDA_HANDLE_BYTES = 64
"""Size of a ``cudaIpcMemHandle_t`` (``CUDA_IPC_HANDLE_SIZE`` in the CUDA runtime's headers)."""

_LARGEST = (1 << 63) - 1


@dataclass(frozen=True)
class Segment:
    """A segment as announced to a receiver.

    Attributes:
        field: the segment's field in the request.
        node, device: host id and device of the readers.
        header: name of the shared memory with the header: the segment itself, or the header of a CUDA segment.
        cuda_handle: CUDA IPC handle; empty for a segment in shared memory.
        size: in bytes, with the bytes before the first tensor.
        generation: number of the contents.
        torch: storage of a torch process, instead of a segment with a header; ``header`` is its name.
        rank: the only rank that reads the segment; None: every rank at the place.
        tensors: the tensors with byte offsets.
        until: end of the lease, on :func:`time.monotonic`'s clock.
    """

    field: str
    node: str
    device: str
    header: str
    cuda_handle: bytes
    size: int
    generation: int
    tensors: list[tuple[TensorMeta, int]]
    until: float
    torch: SharedStorage | CudaStorage | None = None
    rank: int | None = None


def from_proto(message: verbs_pb2.TensorSegment, field: str) -> Segment:
    """Parse the segment of a message that arrived just now; ``field`` is its field in the request.

    Raises FIELD_REQUIRED without a handle. Raises FIELD_INVALID for an invalid name or a handle of another size, and
    for a tensor that has no name, is repeated, has an unknown dtype, is not aligned to its dtype, is out of range, or
    overlaps another tensor.
    """
    if message.WhichOneof("handle") in ("torch_shared_memory", "torch_cuda_memory"):
        return _of_torch(message, field)
    cuda = message.WhichOneof("handle") == "cuda_ipc"
    if not cuda and not message.shared_memory:
        raise Reason.FIELD_REQUIRED.error("the segment has no handle", field=f"{field}.handle")
    header = message.header_memory if cuda else message.shared_memory
    check_name(header, f"{field}.header_memory" if cuda else f"{field}.shared_memory")
    if cuda and len(message.cuda_ipc) != CUDA_HANDLE_BYTES:
        raise Reason.FIELD_INVALID.error(
            f"a CUDA IPC handle has {CUDA_HANDLE_BYTES} bytes, not {len(message.cuda_ipc)}", field=f"{field}.cuda_ipc"
        )
    tensors = _tensors(message, 0 if cuda else HEADER_BYTES, field)
    _refuse_overlap(tensors, field)
    return Segment(
        field=field,
        node=message.node,
        device=message.device,
        header=header,
        cuda_handle=message.cuda_ipc,
        size=message.size,
        generation=message.generation,
        tensors=tensors,
        until=time.monotonic() + seconds(message.lease),
        rank=message.reader.rank if message.HasField("reader") else None,
    )


def _of_torch(message: verbs_pb2.TensorSegment, field: str) -> Segment:
    """Parse a storage of a torch process. Tensors may overlap: views of one storage, and tied weights."""
    handle = message.WhichOneof("handle")
    tensors = _tensors(message, 0, field)
    try:
        storage = _shared(message) if handle == "torch_shared_memory" else _cuda(message)
    except ValueError as error:
        raise Reason.FIELD_INVALID.error(str(error), field=f"{field}.{handle}") from None
    if not message.HasField("reader"):
        raise Reason.FIELD_REQUIRED.error("reader is required for a storage of torch", field=f"{field}.reader")
    return Segment(
        field=field,
        node=message.node,
        device=message.device,
        header=storage.name if isinstance(storage, SharedStorage) else f"the memory of {storage.device}",
        cuda_handle=b"",
        size=message.size,
        generation=0,
        tensors=tensors,
        until=time.monotonic() + seconds(message.lease),
        torch=storage,
        rank=message.reader.rank,
    )


def _shared(message: verbs_pb2.TensorSegment) -> SharedStorage:
    return SharedStorage(shared_name(message.torch_shared_memory.name, "the name"), message.size)


def _cuda(message: verbs_pb2.TensorSegment) -> CudaStorage:
    memory = message.torch_cuda_memory
    storage = CudaStorage(
        device=message.device,
        handle=memory.handle,
        offset=memory.offset,
        size=message.size,
        ref_counter=memory.ref_counter,
        ref_counter_offset=memory.ref_counter_offset,
        event=memory.event,
        event_sync_required=memory.event_sync_required,
    )
    check_cuda(storage)
    return storage


def _tensors(message: verbs_pb2.TensorSegment, start: int, field: str) -> list[tuple[TensorMeta, int]]:
    if not 0 < message.size <= _LARGEST:
        raise Reason.FIELD_INVALID.error(f"size is {message.size}, which no segment can have", field=f"{field}.size")
    tensors = [
        _tensor(tensor, message.size, start, f"{field}.tensors[{index}]")
        for index, tensor in enumerate(message.tensors)
    ]
    by_name((meta for meta, _ in tensors), field=f"{field}.tensors")
    return tensors


def to_proto(bucket: Bucket, *, start: int, node: str, generation: int, lease_s: float) -> verbs_pb2.TensorSegment:
    """Describe a packed bucket at byte ``start`` of a segment; the caller adds memory and device."""
    return verbs_pb2.TensorSegment(
        node=node,
        generation=generation,
        lease=duration(lease_s),
        tensors=[
            verbs_pb2.TensorHandle(
                name=meta.name,
                dtype=dtype_name(meta.dtype),
                shape=verbs_pb2.Shape(dims=meta.shape),
                offset=start + offset,
            )
            for meta, offset in zip(bucket.metas, bucket.offsets, strict=True)
        ],
    )


def at(segments: Sequence[Segment], node: str, device: str, rank: int = 0) -> list[Segment]:
    """Return the segments of every source for a rank at this place; ``rank`` is the rank in the stage.

    Raises NOT_COLOCATED without segments. Raises FIELD_INVALID if tensors of the request are missing or repeated: ranks
    with different tensors would be a mixture.
    """
    matches = [
        segment
        for segment in segments
        if (segment.node, segment.device) == (node, device) and segment.rank in (None, rank)
    ]
    if not matches:
        places = sorted({f"{segment.device} of {segment.node}" for segment in segments})
        raise Reason.NOT_COLOCATED.error(
            f"this rank is on {device} of {node or 'a host without shared memory'}, the segments are for "
            f"{', '.join(places)}",
            field="segments",
        )
    metas = by_name((meta for segment in matches for meta, _ in segment.tensors), field="segments.tensors")
    missing = sorted({meta.name for segment in segments for meta, _ in segment.tensors} - metas.keys())
    if missing:
        raise Reason.FIELD_INVALID.error(
            f"the segments for {device} of {node} lack {len(missing)} tensors of the request: {', '.join(missing[:5])}",
            field="segments",
        )
    return matches


def _tensor(message: verbs_pb2.TensorHandle, size: int, start: int, field: str) -> tuple[TensorMeta, int]:
    if not message.name:
        raise Reason.FIELD_INVALID.error("a tensor needs a name", field=f"{field}.name")
    meta = TensorMeta(message.name, parse_dtype(message.dtype, f"{field}.dtype"), tuple(message.shape.dims))
    if max(meta.nbytes, *meta.shape, 0) > _LARGEST:
        raise Reason.FIELD_INVALID.error(f"{meta.name}: no tensor has the shape {meta.shape}", field=f"{field}.shape")
    if not start <= message.offset <= size - meta.nbytes or message.offset % meta.dtype.itemsize:
        raise Reason.FIELD_INVALID.error(
            f"{meta.name}: {meta.nbytes} bytes at {message.offset} of {size}, or not where a {meta.dtype} may start",
            field=f"{field}.offset",
        )
    return meta, message.offset


def _refuse_overlap(tensors: Sequence[tuple[TensorMeta, int]], field: str) -> None:
    end, previous_name = 0, ""
    for meta, offset in sorted(tensors, key=lambda entry: (entry[1], entry[0].nbytes)):
        if offset < end and meta.nbytes:
            raise Reason.FIELD_INVALID.error(f"{previous_name} and {meta.name} overlap", field=f"{field}.tensors")
        end, previous_name = max(end, offset + meta.nbytes), meta.name
