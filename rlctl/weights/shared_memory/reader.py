"""The receiver's side of shared segments: mapped once, kept while the owner lives, read within the lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.receiver import Receiver, ReceiveStats
from rlctl.weights.shared_memory.cuda_ipc import open_cuda
from rlctl.weights.shared_memory.posix import HEADER_BYTES, abandoned, open_memory, sweep
from rlctl.weights.shared_memory.segment import Segment, at
from rlctl.weights.shared_memory.torch_storage import TorchMapping
from rlctl.weights.tensor.placement import device_id, host_id

WATCH_S = 1.0
"""Interval of the check for dead owners: their memory is released after at most this time."""


class Mapping:
    """A mapped segment.

    Attributes:
        header: shared memory with the segment's header.
        data: the contents: 1-d uint8, on their device.
    """

    def __init__(self, segment: Segment, device: torch.device) -> None:
        """Map a segment. Raises as :func:`open_memory` and :func:`open_cuda`."""
        path = segment.field
        self.cuda_handle = segment.cuda_handle
        if segment.cuda_handle:
            self.header = open_memory(segment.header, HEADER_BYTES, f"{path}.header_memory", f"{path}.header_memory")
            self.data = open_cuda(segment.cuda_handle, segment.size, device, f"{path}.cuda_ipc")
        else:
            self.header = open_memory(segment.header, segment.size, f"{path}.shared_memory", f"{path}.size")
            self.data = self.header.data

    def is_of(self, segment: Segment) -> bool:
        """Return whether this is the mapping of ``segment``, whose header has the same name."""
        return (self.cuda_handle, self.data.numel()) == (segment.cuda_handle, segment.size)

    def stands(self, segment: Segment) -> bool:
        """Return whether the contents are still those of the segment's message."""
        return self.header.generation == segment.generation


class Reading:
    """Segments that were checked and may be read."""

    def __init__(self, sources: Sequence[tuple[Segment, Mapping | TorchMapping]]) -> None:
        self._sources = sources

    def proceed(self) -> None:
        """Raise SEGMENT_EXPIRED after the end of a lease or a reuse of the memory."""
        now = time.monotonic()
        for segment, mapping in self._sources:
            if now >= segment.until:
                raise Reason.SEGMENT_EXPIRED.error(f"the lease on {segment.header} is over", field=segment.field)
            if isinstance(mapping, TorchMapping):
                if not mapping.stands:
                    raise Reason.SEGMENT_EXPIRED.error(
                        f"{segment.header} was removed before it was read",
                        field=segment.field,
                        next_step="Keep the tensors until the request is answered.",
                    )
            elif not mapping.stands(segment):
                raise Reason.SEGMENT_EXPIRED.error(f"{segment.header} was used again", field=segment.field)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return the full tensors, as views of the mapped memory."""
        return [
            (meta.name, mapping.data[offset : offset + meta.nbytes].view(meta.dtype).reshape(meta.shape))
            for segment, mapping in self._sources
            for meta, offset in segment.tensors
        ]

    def close(self) -> None:
        """Drop the references to storages of torch. The tensors must not be read afterwards."""
        for _, mapping in self._sources:
            if isinstance(mapping, TorchMapping):
                mapping.release()


class SegmentReader:
    """Reads segments at one rank, for one caller at a time; a thread watches the owners."""

    def __init__(self, device: torch.device, threads: int = 1, *, rank: int = 0) -> None:
        """Create a reader with ``threads`` copying threads; ``rank`` is its rank in the stage.

        Removes segments of crashed owners.
        """
        self._device = device
        self._rank = rank
        self._threads = threads
        self._mappings: dict[str, Mapping] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None
        sweep()

    @property
    def mapped(self) -> list[str]:
        """Names of the mapped segments (their headers), sorted."""
        with self._lock:
            return sorted(self._mappings)

    def check(self, segments: Sequence[Segment], receiver: Receiver) -> Reading:
        """Find and map the segments for this rank, with all possible checks before the first byte.

        Raises NOT_COLOCATED, SEGMENT_NOT_FOUND, SEGMENT_EXPIRED, FIELD_INVALID.
        """
        own_segments = self.for_this_rank(segments)
        for segment in own_segments:
            for index, (meta, _) in enumerate(segment.tensors):
                if receiver.fits(meta):
                    continue
                path = f"{segment.field}.tensors[{index}]"
                receiver.check(meta, f"{path}.name", f"{path}.dtype", f"{path}.shape")
        return self.open(own_segments)

    def for_this_rank(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the segments for this rank. Raises as :func:`rlctl.weights.shared_memory.segment.at`."""
        return at(segments, host_id(), device_id(self._device), self._rank)

    def open(self, segments: Sequence[Segment]) -> Reading:
        """Map segments for this rank (see :func:`rlctl.weights.shared_memory.segment.at`), without a check of tensors.

        Raises SEGMENT_NOT_FOUND, SEGMENT_EXPIRED, FIELD_INVALID.
        """
        reading = Reading([(segment, self._map(segment)) for segment in segments])
        reading.proceed()
        return reading

    def read(self, reading: Reading, receiver: Receiver, *, gently: bool = False) -> ReceiveStats:
        """Copy checked segments into place; ``gently``: in this thread alone, to leave cores to other work.

        Raises as :meth:`Receiver.copy`, including SEGMENT_EXPIRED.
        """
        threads = 1 if gently else self._threads
        try:
            return receiver.copy("shared segments", reading.tensors(), reading.proceed, threads=threads)
        finally:
            reading.close()

    def close(self) -> None:
        """Unmap all segments, after current reads. From any thread."""
        with self._lock:
            self._closed.set()
            self._mappings.clear()

    def _map(self, segment: Segment) -> Mapping | TorchMapping:
        if segment.torch is not None:
            return TorchMapping(segment.torch, self._device, segment.field)
        with self._lock:
            if self._closed.is_set():
                raise Reason.CANCELLED.error("the reader was closed")
            mapping = self._mappings.get(segment.header)
            if mapping is None or not mapping.is_of(segment):
                mapping = self._mappings[segment.header] = Mapping(segment, self._device)
            if self._watch is None:
                self._watch = threading.Thread(target=self._look_after, name="segments", daemon=True)
                self._watch.start()
            return mapping

    def _look_after(self) -> None:
        """Forget segments whose owners are gone: their memory is freed after the last mapping."""
        while not self._closed.wait(WATCH_S):
            names = [name for name in self.mapped if abandoned(name)]
            with self._lock:
                for name in names:
                    self._mappings.pop(name, None)
                if not self._mappings:
                    self._watch = None
                    return
