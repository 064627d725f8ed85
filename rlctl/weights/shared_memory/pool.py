"""The segments of a sender: allocated once, leased to receivers, and reused without an open lease."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1 import verbs_pb2
from rlctl.weights.shared_memory.cuda_ipc import allocate
from rlctl.weights.shared_memory.posix import HEADER_BYTES, OwnedMemory
from rlctl.weights.tensor.placement import device_id

LEASE_MARGIN_S = 5.0
"""Added to a lease at the sender: the receiver's clock starts later, at the arrival of the message."""


class Memory(Protocol):
    """A segment's memory.

    Attributes:
        header: shared memory with the generation of the contents.
        data: memory for tensors, 1-d uint8.
        start: byte of the segment at which ``data`` starts.
    """

    header: OwnedMemory
    data: torch.Tensor
    start: int

    def address(self, message: verbs_pb2.TensorSegment) -> None:
        """Set the handle and the size in a message."""

    def synchronise(self) -> None:
        """Wait for enqueued copies into the memory."""

    def close(self) -> None:
        """Free the memory. Idempotent."""


class HostMemory:
    """Memory in ``/dev/shm``; see :class:`Memory`."""

    start = HEADER_BYTES

    def __init__(self, nbytes: int) -> None:
        """Allocate. Raises SHARED_MEMORY_FULL, UNSUPPORTED."""
        self.header = OwnedMemory(HEADER_BYTES + nbytes)
        self.data = self.header.data[HEADER_BYTES:]

    def address(self, message: verbs_pb2.TensorSegment) -> None:
        message.shared_memory, message.size = self.header.name, self.header.size

    def synchronise(self) -> None:
        """Return at once: copies from a device into this memory are synchronous."""

    def close(self) -> None:
        self.header.close()
        self.data = self.data.new_empty(0)


class CudaMemory:
    """Memory of a GPU, with a header in ``/dev/shm``; see :class:`Memory`."""

    start = 0

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Allocate. Raises SHARED_MEMORY_FULL, UNSUPPORTED, INTERNAL."""
        self.header = OwnedMemory(HEADER_BYTES)
        self._device = device
        self.data, self._handle = allocate(nbytes, device)

    def address(self, message: verbs_pb2.TensorSegment) -> None:
        message.cuda_ipc, message.header_memory = self._handle, self.header.name
        message.size = self.data.numel()

    def synchronise(self) -> None:
        """Wait for copies into the memory: handles order nothing between processes."""
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Drop the reference; the last view frees the memory."""
        self.header.close()
        self.data = self.data.new_empty(0)


@dataclass(eq=False)
class _Entry:
    memory: Memory
    writing: bool = False
    leases: dict[object, float] = field(default_factory=dict)


class SegmentPool:
    """At most ``most`` segments on one device. From any thread.

    Attributes:
        device: the device of the segments.
        device_id: identity of that device.
        allocations: segments allocated so far; constant while the sizes do not grow.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self.device_id = device_id(device)
        self.allocations = 0
        self.device = device
        self._most = most
        self._entries: list[_Entry] = []
        self._changed = threading.Condition()
        self._closed = False

    @property
    def nbytes(self) -> int:
        with self._changed:
            return sum(entry.memory.data.nbytes for entry in self._entries)

    def take(self, nbytes: int, deadline: float) -> Memory:
        """Take a segment of at least ``nbytes`` bytes without readers, for writing; wait for a free segment.

        ``deadline`` is on :func:`time.monotonic`'s clock. Raises DEADLINE_EXCEEDED, CANCELLED (closed), and errors of
        an allocation.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise Reason.CANCELLED.error("the segments were closed")
                entry = self._free(nbytes)
                if entry is not None:
                    entry.writing = True
                    entry.memory.header.begin()
                    return entry.memory
                now = time.monotonic()
                if now >= deadline:
                    raise Reason.DEADLINE_EXCEEDED.error("receivers still read every segment")
                ends = [max(e.leases.values()) for e in self._entries if e.leases and not e.writing]
                self._changed.wait(max(0.0, min([deadline, *ends]) - now))

    def lend(self, memory: Memory, borrower: object, lease_s: float) -> int:
        """Lend written contents to a receiver for ``lease_s`` seconds; return the generation."""
        memory.synchronise()
        with self._changed:
            entry = self._entry(memory)
            entry.writing = False
            entry.leases[borrower] = time.monotonic() + lease_s + LEASE_MARGIN_S
            return memory.header.end()

    def give_back(self, memory: Memory, borrower: object = None) -> None:
        """End a borrower's lease; without a borrower, end a write without contents. Idempotent."""
        with self._changed:
            for entry in self._entries:
                if entry.memory is memory:
                    entry.leases.pop(borrower, None)
                    entry.writing = entry.writing and borrower is not None
            self._changed.notify_all()

    def close(self) -> None:
        """Remove every segment. Receivers keep their mapping until they notice."""
        with self._changed:
            self._closed = True
            for entry in self._entries:
                entry.memory.close()
            self._entries.clear()
            self._changed.notify_all()

    def _entry(self, memory: Memory) -> _Entry:
        for entry in self._entries:
            if entry.memory is memory:
                return entry
        raise Reason.CANCELLED.error("the segments were closed")

    def _free(self, nbytes: int) -> _Entry | None:
        """Return a free segment that is large enough. A new segment may replace smaller free segments."""
        now = time.monotonic()
        free = [e for e in self._entries if not e.writing and all(end <= now for end in e.leases.values())]
        for entry in free:
            entry.leases.clear()
        fitting = [entry for entry in free if entry.memory.data.numel() >= nbytes]
        if fitting:
            return min(fitting, key=lambda entry: entry.memory.data.numel())
        if len(self._entries) >= self._most:
            if not free:
                return None
            self._remove(free.pop())
        while True:
            try:
                entry = self._make(nbytes)
            except RlctlError as error:
                if error.reason is not Reason.SHARED_MEMORY_FULL or not self._entries:
                    raise
                if not free:
                    return None  # a segment with readers makes room at its return
                self._remove(free.pop())
            else:
                self._entries.append(entry)
                self.allocations += 1
                return entry

    def _make(self, nbytes: int) -> _Entry:
        cuda = self.device.type == "cuda"
        return _Entry(CudaMemory(nbytes, self.device) if cuda else HostMemory(nbytes))

    def _remove(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        entry.memory.close()
