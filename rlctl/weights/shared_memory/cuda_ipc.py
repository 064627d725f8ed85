"""Device memory that another process maps by handle: plain CUDA runtime calls, without torch's pickled handles.

The memory comes from ``cudaMalloc``, not from torch's allocator, so that a handle stands for exactly one segment with
any settings of the allocator. CUDA frees the memory after the owner's death and the last close by a mapping process.
"""

from __future__ import annotations

import ctypes
import functools
import weakref

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.shared_memory.segment import CUDA_HANDLE_BYTES

_GRANULE = 2 << 20
"""CUDA shares memory in blocks of this size: a smaller allocation would expose its neighbours."""

_LAZY_ENABLE_PEER_ACCESS = 1
_MEMORY_ALLOCATION = 2


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * CUDA_HANDLE_BYTES),)


class _DeviceMemory:
    """Device memory for torch (``__cuda_array_interface__``, version 2); freed or closed with the last view."""

    def __init__(self, pointer: int, size: int, device: torch.device, end: str) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 2}
        # At the interpreter's exit the driver frees or closes the memory, and the runtime may be gone.
        weakref.finalize(self, _end, end, pointer, device).atexit = False


def allocate(size: int, device: torch.device) -> tuple[torch.Tensor, bytes]:
    """Allocate at least ``size`` bytes on a GPU, 1-d uint8; return the memory and its handle for other processes.

    Raises SHARED_MEMORY_FULL, INTERNAL.
    """
    size = -(-max(size, 1) // _GRANULE) * _GRANULE
    pointer, handle = ctypes.c_void_p(), _Handle()
    with torch.cuda.device(device):
        code = _runtime().cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
        if code == _MEMORY_ALLOCATION:
            raise Reason.SHARED_MEMORY_FULL.error(f"{size} bytes on {device}: {_words(code)}")
        _check(code, "cudaMalloc")
        memory = _DeviceMemory(pointer.value or 0, size, device, "cudaFree")
        _check(_runtime().cudaIpcGetMemHandle(ctypes.byref(handle), pointer), "cudaIpcGetMemHandle")
        return torch.as_tensor(memory, device=device), bytes(handle.reserved)


def open_cuda(handle: bytes, size: int, device: torch.device, field: str) -> torch.Tensor:
    """Map another process's memory on this GPU, 1-d uint8, ``size`` bytes; closed with the last view.

    Raises SEGMENT_NOT_FOUND if CUDA cannot open the handle, FIELD_INVALID if CUDA reports less memory.
    """
    if device.type != "cuda":
        raise Reason.SEGMENT_NOT_FOUND.error("this rank has no GPU to open a CUDA handle on", field=field)
    pointer = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = _runtime().cudaIpcOpenMemHandle(
            ctypes.byref(pointer), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        )
        if code:
            raise Reason.SEGMENT_NOT_FOUND.error(f"CUDA cannot open the handle: {_words(code)}", field=field)
        memory = _DeviceMemory(pointer.value or 0, size, device, "cudaIpcCloseMemHandle")
        base, allocated = ctypes.c_void_p(), ctypes.c_size_t()
        code = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(allocated), pointer)
        if not code and allocated.value < size:
            raise Reason.FIELD_INVALID.error(f"{allocated.value} bytes are behind the handle, not {size}", field=field)
        return torch.as_tensor(memory, device=device)


def refuse_beyond_allocation(pointer: int, size: int, field: str) -> None:
    """Raise FIELD_INVALID if an allocation has less than ``size`` bytes from a pointer on."""
    base, allocated = ctypes.c_void_p(), ctypes.c_size_t()
    code = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(allocated), ctypes.c_void_p(pointer))
    if not code and (base.value or 0) + allocated.value < pointer + size:
        raise Reason.FIELD_INVALID.error(f"less than {size} bytes are behind the handle", field=field)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has already loaded."""
    runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    runtime.cudaFree.argtypes = runtime.cudaIpcCloseMemHandle.argtypes = (ctypes.c_void_p,)
    return runtime


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _end(function: str, pointer: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        getattr(_runtime(), function)(pointer)


def _words(code: int) -> str:
    """Return the text of an error code, and clear the error so that torch does not see it."""
    _runtime().cudaGetLastError()
    return str(_runtime().cudaGetErrorString(code).decode())


def _check(code: int, function: str) -> None:
    if code:
        raise Reason.INTERNAL.error(f"{function}: {_words(code)}")
