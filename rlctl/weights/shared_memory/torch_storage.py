"""Storages of another torch process, read as torch's own reductions read them, without a pickle.

The sender counts one reference for each reader before it sends a handle. The reader takes that reference over when it
maps the storage and drops it when the mapping ends, with whatever result. The sender may drop its own storage before:
the memory stays until the last reference is gone.
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
"""torch's header in front of a storage, with the number of references (``map_alloc_alignment``)."""

_EXPANDABLE = b"e"
"""Second byte of the handle of an expandable segment, which is many allocations side by side."""

_starting = threading.Lock()


class TorchMapping:
    """A mapped storage and the reference to it.

    Attributes:
        data: its contents: 1-d uint8, on the device that they lie on.
    """

    data: torch.Tensor
    _drop: weakref.finalize[..., object]

    def __init__(self, storage: SharedStorage | CudaStorage, device: torch.device, field: str) -> None:
        """Raises SEGMENT_NOT_FOUND, FIELD_INVALID; ``field``: where the request has the segment."""
        self._name = ""
        if isinstance(storage, SharedStorage):
            self._map_shared(storage, field)
        else:
            self._map_cuda(storage, device, field)

    @property
    def stands(self) -> bool:
        """Whether the storage is still the one that was mapped: no process has removed it."""
        return not self._name or identity(self._name) == self._identity

    def release(self) -> None:
        """Drop the reference. Harmless to call again; without a call the end of the object does it."""
        self._drop()
        self.data = self.data.new_empty(0)

    def _map_shared(self, storage: SharedStorage, field: str) -> None:
        where = f"{field}.torch_shared_memory"
        whole, found = map_other(storage.name, _HEADER_BYTES + storage.size, where, f"{field}.size")
        manager = _manager()
        try:
            # Its first byte only: torch maps it writable, for the number of references in front of it.
            opened = torch.UntypedStorage._new_shared_filename_cpu(manager, b"/" + storage.name.encode(), 1)
            opened._shared_decref()  # the one that the sender has counted for this reader
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            raise Reason.SEGMENT_NOT_FOUND.error(f"{storage.name}: {cause}", field=where) from error
        self._name, self._identity = storage.name, found
        self._drop = weakref.finalize(self, _drop_shared, storage.name, found, [opened])
        self._drop.atexit = False
        del opened
        self.data = whole[_HEADER_BYTES:]

    def _map_cuda(self, storage: CudaStorage, device: torch.device, field: str) -> None:
        where = f"{field}.torch_cuda_memory"
        if device.type != "cuda" or device_id(device) != storage.device:
            raise Reason.SEGMENT_NOT_FOUND.error(f"this rank is not on GPU {storage.device}", field=where)
        # torch enlarges a file that is too small: it must be one of its own before the counter in it is changed.
        map_other(storage.ref_counter, _HEADER_BYTES + 8 * REF_COUNTERS, where, where)
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
            raise Reason.SEGMENT_NOT_FOUND.error(f"CUDA cannot open the handle: {cause}", field=where) from error
        if storage.handle[1:2] != _EXPANDABLE:
            refuse_beyond_allocation(opened.data_ptr(), storage.size, where)
        self._drop = weakref.finalize(self, list.clear, [opened])
        self._drop.atexit = False
        self.data = torch.empty(0, dtype=torch.uint8, device=device).set_(opened, 0, (storage.size,), (1,))


def _drop_shared(name: str, found: tuple[int, int], opened: list[torch.UntypedStorage]) -> None:
    """Drop a reference through torch. torch ends the process when the memory of its last reference has been removed:
    such a mapping stays for as long as the process.
    """
    if identity(name) != found:
        for storage in opened:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(storage))
    opened.clear()


@functools.cache
def _of_this_process() -> bytes:
    handle: bytes = torch.UntypedStorage._new_using_filename_cpu(1)._share_filename_cpu_()[0]
    return handle


def _manager() -> bytes:
    """The socket of this process's own manager of torch's, which removes what a reader that dies has mapped.

    The sender's manager is not called: a connection to it would keep it alive after the sender's end, with all memory
    that the sender left behind.
    """
    with _starting:
        return _of_this_process()
