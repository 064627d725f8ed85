"""Storages of another torch process, read as torch's own reductions read them, without a pickle.

Before it sends a handle, the sender counts one reference for each reader. The reader takes that reference over when it
maps the storage, and drops it at the end of the mapping, with any result. The sender may drop its own storage before:
the memory remains until the last reference is dropped.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref

import torch

from rlctl.contract.errors import Reason
from rlctl.contract.serialized_tensors.handles import REF_COUNTERS, CudaStorage, SharedStorage
from rlctl.weights.shared_memory.cuda_ipc import refuse_beyond_allocation
from rlctl.weights.shared_memory.posix import identity, map_other
from rlctl.weights.tensor.placement import device_id

_HEADER_BYTES = 64
"""torch's header before a storage, with the number of references (``map_alloc_alignment``)."""

_EXPANDABLE = b"e"
"""Second byte of the handle of an expandable segment, which consists of many adjacent allocations."""

_starting = threading.Lock()


class TorchMapping:
    """A mapped storage and the reference to it.

    Attributes:
        data: the contents: 1-d uint8, on their device.
    """

    data: torch.Tensor
    _drop: weakref.finalize[..., object]

    def __init__(self, storage: SharedStorage | CudaStorage, device: torch.device, field: str) -> None:
        """Map a storage; ``field`` is the segment's field in the request. Raises SEGMENT_NOT_FOUND, FIELD_INVALID."""
        self._name = ""
        if isinstance(storage, SharedStorage):
            self._map_shared(storage, field)
        else:
            self._map_cuda(storage, device, field)

    @property
    def stands(self) -> bool:
        """Whether the mapped storage still exists: no process has removed or replaced its file."""
        return not self._name or identity(self._name) == self._identity

    def release(self) -> None:
        """Drop the reference. Idempotent; the end of the object drops it too."""
        self._drop()
        self.data = self.data.new_empty(0)

    def _map_shared(self, storage: SharedStorage, field: str) -> None:
        memory_field = f"{field}.torch_shared_memory"
        whole, identity = map_other(storage.name, _HEADER_BYTES + storage.size, memory_field, f"{field}.size")
        manager = _manager()
        try:
            # Only the first byte: torch maps it writable, for the number of references before it.
            opened = torch.UntypedStorage._new_shared_filename_cpu(manager, b"/" + storage.name.encode(), 1)
            opened._shared_decref()  # the reference that the sender counted for this reader
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise Reason.SEGMENT_NOT_FOUND.error(f"{storage.name}: {cause}", field=memory_field) from error
        self._name, self._identity = storage.name, identity
        self._drop = weakref.finalize(self, _drop_shared, storage.name, identity, [opened])
        self._drop.atexit = False
        del opened
        self.data = whole[_HEADER_BYTES:]

    def _map_cuda(self, storage: CudaStorage, device: torch.device, field: str) -> None:
        memory_field = f"{field}.torch_cuda_memory"
        if device.type != "cuda" or device_id(device) != storage.device:
            raise Reason.SEGMENT_NOT_FOUND.error(f"this rank is not on GPU {storage.device}", field=memory_field)
        # torch enlarges a file that is too small. So check for a file of torch before its counter is changed.
        map_other(storage.ref_counter, _HEADER_BYTES + 8 * REF_COUNTERS, memory_field, memory_field)
        index = torch.cuda.current_device() if device.index is None else device.index
        try:
            opened = torch.UntypedStorage._new_shared_cuda(
                index,
                storage.handle,
                storage.size,
                storage.offset,
                b"/" + storage.ref_counter.encode(),
                storage.ref_counter_offset,
                storage.event,
                storage.event_sync_required,
            )
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise Reason.SEGMENT_NOT_FOUND.error(f"CUDA cannot open the handle: {cause}", field=memory_field) from error
        if storage.handle[1:2] != _EXPANDABLE:
            refuse_beyond_allocation(opened.data_ptr(), storage.size, memory_field)
        self._drop = weakref.finalize(self, list.clear, [opened])
        self._drop.atexit = False
        self.data = torch.empty(0, dtype=torch.uint8, device=device).set_(opened, 0, (storage.size,), (1,))


def _drop_shared(name: str, file_identity: tuple[int, int], opened: list[torch.UntypedStorage]) -> None:
    """Drop a reference through torch.

    torch ends the process if the memory of its last reference has been removed. Such a mapping is kept for the life of
    the process.
    """
    if identity(name) != file_identity:
        for storage in opened:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(storage))
    opened.clear()


@functools.cache
def _of_this_process() -> bytes:
    handle: bytes = torch.UntypedStorage._new_using_filename_cpu(1)._share_filename_cpu_()[0]
    return handle


def _manager() -> bytes:
    """Return the socket of torch's manager of this process, which removes the mappings of a reader that dies.

    The sender's manager is not called. A connection would keep it alive after the sender's end, with all memory that
    the sender left behind.
    """
    with _starting:
        return _of_this_process()
