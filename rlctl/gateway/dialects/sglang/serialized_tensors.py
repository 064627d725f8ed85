"""Serialised tensors of co-located trainers, as segments for the ranks of the addressed engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason
from rlctl.contract.serialized_tensors.handles import CudaStorage, EmptyStorage
from rlctl.contract.serialized_tensors.payload import Placed
from rlctl.v1.common_pb2 import WorkerCoordinates
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.verbs_pb2 import SegmentReader, Shape, TensorHandle, TensorSegment, TorchCudaMemory, TorchSharedMemory

FIELD = "serialized_named_tensors"

LEASE_S = 300.0
"""Seconds that ranks may read. The sender keeps its tensors until the response."""

Reader = tuple[str, WorkerCoordinates]
"""A slot and a rank in it."""


def segments_by_stage(payloads: Sequence[list[Placed]], stages: Sequence[Stage]) -> dict[str, list[TensorSegment]]:
    """Return the segments of every stage, by slot. There is one payload for each rank, in the order of stages and
    ranks.

    A payload on a GPU belongs to the rank on that GPU, in any order. Raises LENGTH_MISMATCH, NOT_COLOCATED and
    FIELD_INVALID.
    """
    readers = readers_of(stages)
    if len(payloads) != len(readers):
        names = ", ".join(stage.registration.slot for stage in stages)
        raise Reason.LENGTH_MISMATCH.error(
            f"{len(payloads)} payloads for the {len(readers)} ranks of {names}",
            field=FIELD,
            next_step="Send one payload for each rank, to each engine at its own address.",
        )
    by_slot: dict[str, list[TensorSegment]] = {}
    for number, (placed, reader) in enumerate(_matched(payloads, readers)):
        segments = [segment(each, reader, f"{FIELD}[{number}]") for each in placed]
        by_slot.setdefault(reader[0], []).extend(segments)
    return by_slot


def readers_of(stages: Sequence[Stage]) -> list[Reader]:
    """Return the ranks of stages, in order."""
    return [(stage.registration.slot, worker) for stage in stages for worker in _workers(stage)]


def _workers(stage: Stage) -> list[WorkerCoordinates]:
    return sorted(stage.registration.layout.workers, key=lambda worker: worker.rank)


def _matched(payloads: Sequence[list[Placed]], readers: Sequence[Reader]) -> Iterator[tuple[list[Placed], Reader]]:
    by_device = {reader[1].device: reader for reader in readers}
    matched_devices: set[str] = set()
    for number, placed in enumerate(payloads):
        device = _gpu(placed, number)
        if device in matched_devices:
            raise Reason.FIELD_INVALID.error(f"GPU {device} has another payload before", field=f"{FIELD}[{number}]")
        if not device:
            yield placed, readers[number]
        elif device in by_device:
            matched_devices.add(device)
            yield placed, by_device[device]
        else:
            raise Reason.NOT_COLOCATED.error(
                f"the tensors are on GPU {device}; the ranks are on {', '.join(sorted(by_device))}",
                field=f"{FIELD}[{number}]",
            )


def _gpu(placed: Sequence[Placed], number: int) -> str:
    """Return the GPU of a payload; "" for CPU memory or an empty payload."""
    devices = sorted({each.storage.device if isinstance(each.storage, CudaStorage) else "" for each in placed})
    if len(devices) > 1:
        raise Reason.FIELD_INVALID.error("the payload has tensors on several devices", field=f"{FIELD}[{number}]")
    return devices[0] if devices else ""


def segment(placed: Placed, reader: Reader, where: str) -> TensorSegment:
    """Return the segment for a rank to read a storage; ``where`` is the field. Raises NOT_COLOCATED."""
    slot, worker = reader
    if not worker.host_id:
        raise Reason.NOT_COLOCATED.error(
            f"rank {worker.rank} of {slot} shares no memory with another process", field=where
        )
    message = TensorSegment(
        node=worker.host_id,
        device=worker.device,
        size=placed.storage.size,
        lease=duration(LEASE_S),
        reader=SegmentReader(slot=slot, rank=worker.rank),
        tensors=[
            TensorHandle(name=each.name, dtype=each.dtype, shape=Shape(dims=each.shape), offset=each.offset)
            for each in placed.tensors
        ],
    )
    storage = placed.storage
    assert not isinstance(storage, EmptyStorage)  # tensors without elements are refused
    if isinstance(storage, CudaStorage):
        memory = TorchCudaMemory(
            handle=storage.handle,
            offset=storage.offset,
            ref_counter=storage.ref_counter,
            ref_counter_offset=storage.ref_counter_offset,
            event=storage.event,
            event_sync_required=storage.event_sync_required,
        )
        message.torch_cuda_memory.CopyFrom(memory)
    else:
        message.torch_shared_memory.CopyFrom(TorchSharedMemory(name=storage.name))
    return message
