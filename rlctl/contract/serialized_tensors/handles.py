"""Names in pickles of tensors, and their values: handles of memory, and tensors in this memory.

Every constructor here is a pure function of numbers, texts and bytes. No constructor opens, maps or imports anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.contract.serialized_tensors.pickle_reader import Constructor, Instance, Name, Names

MOST_DIMS = 64
"""Dimensions of a tensor (torch's own limit)."""

_LARGEST = (1 << 63) - 1

_SHARED_NAME = re.compile(r"torch_[0-9]{1,10}_[0-9]{1,20}_[0-9]{1,20}")
_MOST_HANDLE = 256
_EVENT_BYTES = 64
REF_COUNTERS = 10_000
"""Counters in one file of torch (``CUDA_IPC_REF_COUNTER_FILE_SIZE``)."""


@dataclass(frozen=True)
class Dtype:
    """A dtype: ``torch.bfloat16`` and 2 bytes."""

    name: str
    itemsize: int


@dataclass(frozen=True, eq=False)
class SharedStorage:
    """A storage in POSIX shared memory with a header that counts references.

    Attributes:
        name: of the shared memory, without the slash.
        size: of the storage, in bytes, without torch's header.
    """

    name: str
    size: int


@dataclass(frozen=True, eq=False)
class CudaStorage:
    """A storage in a GPU's memory behind torch's CUDA IPC handle.

    Attributes:
        device: UUID of the GPU.
        handle: torch's handle of the allocation, opaque.
        offset: bytes of the allocation before the storage.
        size: of the storage, in bytes.
        ref_counter: name of the shared memory with the sender's reference counters, without the slash.
        ref_counter_offset: index of the counter.
        event: CUDA IPC handle of the event recorded by the sender; empty: no event.
        event_sync_required: whether a reader must wait for the event.
    """

    device: str
    handle: bytes
    offset: int
    size: int
    ref_counter: str
    ref_counter_offset: int
    event: bytes
    event_sync_required: bool


@dataclass(frozen=True, eq=False)
class EmptyStorage:
    """A storage of no bytes."""

    size: int = 0


Storage = SharedStorage | CudaStorage | EmptyStorage


@dataclass(frozen=True, eq=False)
class _TypedStorage:
    storage: Storage
    dtype: Dtype


@dataclass(frozen=True, eq=False)
class Tensor:
    """A contiguous tensor in a storage.

    Attributes:
        offset: bytes of the storage before the tensor.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    storage: Storage

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _named(module: str, *names: str) -> list[Name]:
    return [Name(module, name) for name in names]


_ITEMSIZES = {
    1: (
        "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    ),
    2: "bfloat16 float16 int16 uint16",
    4: "float32 int32 uint32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}  # fmt: skip

_DTYPES = {
    Name("torch", name): Dtype(f"torch.{name}", size) for size, names in _ITEMSIZES.items() for name in names.split()
}

_TENSOR_CLASSES = [Name("torch", "Tensor"), Name("torch.nn.parameter", "Parameter")]
_STORAGE_CLASSES = [*_named("torch.storage", "UntypedStorage", "TypedStorage"), Name("torch", "UntypedStorage")]

SIZE = Name("torch", "Size")

METADATA = Name("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
"""Entry for one tensor of a flattened bucket."""

LOCAL_TENSORS = frozenset(
    [
        Name("sglang.srt.model_executor.model_runner_components.weight_updater", "LocalSerializedTensor"),
        Name("sglang.srt.model_executor.model_runner", "LocalSerializedTensor"),
    ]
)
"""A tensor as a pickle for each rank; earlier SGLang versions use the second name."""

_REDUCTIONS = "torch.multiprocessing.reductions"

CUDA_TENSOR = Name(_REDUCTIONS, "rebuild_cuda_tensor")


def is_instance(value: object, classes: frozenset[Name]) -> bool:
    return type(value) is Instance and value.cls in classes


def number(value: object, what: str, most: int = _LARGEST) -> int:
    """Return a whole number from 0 to ``most``. Raises ValueError."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is no whole number from 0 to {most}")
    return value


def shape(value: object, what: str = "size") -> tuple[int, ...]:
    """Return dimensions. Raises ValueError."""
    if type(value) is not tuple or len(value) > MOST_DIMS:
        raise ValueError(f"{what} is no tuple of at most {MOST_DIMS} dimensions")
    dims = tuple(number(dim, what) for dim in value)
    if math.prod(dims) > _LARGEST:
        raise ValueError(f"{what} has too many elements")
    return dims


def dtype(value: object) -> Dtype:
    """Return a dtype. Raises ValueError."""
    if type(value) is not Dtype:
        raise ValueError("the dtype is not supported")
    return value


def _arguments(values: Sequence[object], least: int, most: int = 0) -> None:
    if not least <= len(values) <= (most or least):
        raise ValueError(f"it has {len(values)} arguments")


def _flag(value: object, what: str) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{what} is neither true nor false")
    return value


def _bytes(value: object, what: str, most: int) -> bytes:
    if type(value) is not bytes or len(value) > most:
        raise ValueError(f"{what} is no handle of at most {most} bytes")
    return value


def shared_name(text: str, what: str) -> str:
    """Return a name that torch gives to shared memory, without the slash. Raises ValueError."""
    if not _SHARED_NAME.fullmatch(text):
        raise ValueError(f"{what} is not a name that torch gives to shared memory")
    return text


def _shared_name(value: object, what: str) -> str:
    data = _bytes(value, what, _MOST_HANDLE)
    return shared_name(data[1:].decode("latin-1") if data[:1] == b"/" else "", what)


def _tensor_class(value: object) -> None:
    if value not in _TENSOR_CLASSES:
        raise ValueError("the class is neither Tensor nor Parameter")


def _storage_class(value: object) -> None:
    if value not in _STORAGE_CLASSES:
        raise ValueError("the class is no storage")


def check_cuda(storage: CudaStorage) -> None:
    """Raise ValueError for a storage that contradicts itself, or with a counter outside torch's file."""
    if not 0 < len(storage.handle) <= _MOST_HANDLE:
        raise ValueError(f"the handle has {len(storage.handle)} bytes")
    if len(storage.event) not in (0, _EVENT_BYTES) or (storage.event_sync_required and not storage.event):
        raise ValueError(f"the event has {len(storage.event)} bytes")
    shared_name(storage.ref_counter, "the reference counter")
    number(storage.ref_counter_offset, "ref_counter_offset", REF_COUNTERS - 1)
    number(storage.offset + storage.size, "the end of the storage")


def _tensor(kind: Dtype, dims: object, strides: object, elements: object, storage: Storage) -> Tensor:
    sizes, steps = shape(dims), shape(strides, "stride")
    if len(sizes) != len(steps):
        raise ValueError("size and stride have different lengths")
    expected = 1
    for dim, step in zip(reversed(sizes), reversed(steps), strict=True):
        if dim > 1 and step != expected and 0 not in sizes:
            raise ValueError("the tensor is not contiguous; call contiguous() before it is serialised")
        expected *= dim
    tensor = Tensor(kind, sizes, number(elements, "storage_offset") * kind.itemsize, storage)
    if tensor.nbytes and tensor.offset + tensor.nbytes > storage.size:
        raise ValueError("the tensor reaches beyond its storage")
    return tensor


def _size(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    _arguments(arguments, 1)
    return shape(arguments[0])


def _rebuild_tensor(arguments: tuple[Any, ...]) -> Tensor:
    _arguments(arguments, 3)
    cls, typed_storage, metadata = arguments
    _tensor_class(cls)
    if type(typed_storage) is not _TypedStorage:
        raise ValueError("its storage has no dtype")
    if type(metadata) is not tuple:
        raise ValueError("its metadata is no tuple")
    _arguments(metadata, 4)
    offset, dims, strides, requires_grad = metadata
    _flag(requires_grad, "requires_grad")
    return _tensor(typed_storage.dtype, dims, strides, offset, typed_storage.storage)


def _rebuild_typed_storage(arguments: tuple[Any, ...]) -> _TypedStorage:
    _arguments(arguments, 2)
    storage, kind = arguments
    if type(storage) not in (SharedStorage, EmptyStorage):
        raise ValueError("it has no storage")
    return _TypedStorage(storage, dtype(kind))


def _rebuild_storage_filename(arguments: tuple[Any, ...]) -> SharedStorage | _TypedStorage:
    _arguments(arguments, 4, 5)
    _storage_class(arguments[0])
    _bytes(arguments[1], "the manager", _MOST_HANDLE)  # the socket of the sender's manager, unused by readers
    name, size = _shared_name(arguments[2], "the handle"), number(arguments[3], "size")
    if len(arguments) == 4:
        return SharedStorage(name, size)
    kind = dtype(arguments[4])
    return _TypedStorage(SharedStorage(name, number(size * kind.itemsize, "size")), kind)


def _rebuild_storage_empty(arguments: tuple[Any, ...]) -> EmptyStorage:
    _arguments(arguments, 1)
    _storage_class(arguments[0])
    return EmptyStorage()


def _rebuild_cuda_tensor(arguments: tuple[Any, ...]) -> Tensor:
    _arguments(arguments, 15)
    cls, dims, strides, offset, storage_cls, kind, device, handle, size, storage_offset = arguments[:10]
    requires_grad, ref_counter, ref_counter_offset, event, event_sync = arguments[10:]
    _tensor_class(cls)
    _storage_class(storage_cls)
    _flag(requires_grad, "requires_grad")
    if handle is None or size == 0:
        return _tensor(dtype(kind), dims, strides, offset, EmptyStorage())
    if type(device) is not str or not device or len(device) > 100 or not device.isascii():
        raise ValueError(
            "the device is a number, which another process counts differently; call SGLang's "
            "monkey_patch_torch_reductions() before serialising, which sends the GPU's UUID"
        )
    storage = CudaStorage(
        device=device,
        handle=_bytes(handle, "the handle", _MOST_HANDLE),
        offset=number(storage_offset, "storage_offset_bytes"),
        size=number(size, "storage_size_bytes"),
        ref_counter=_shared_name(ref_counter, "the reference counter"),
        ref_counter_offset=number(ref_counter_offset, "ref_counter_offset"),
        event=b"" if event is None else _bytes(event, "the event", _EVENT_BYTES),
        event_sync_required=_flag(event_sync, "event_sync_required"),
    )
    check_cuda(storage)
    return _tensor(dtype(kind), dims, strides, offset, storage)


CONSTRUCTORS: Mapping[Name, Constructor] = {
    SIZE: _size,
    Name(_REDUCTIONS, "rebuild_tensor"): _rebuild_tensor,
    Name(_REDUCTIONS, "rebuild_typed_storage"): _rebuild_typed_storage,
    Name(_REDUCTIONS, "rebuild_storage_filename"): _rebuild_storage_filename,
    Name(_REDUCTIONS, "rebuild_storage_empty"): _rebuild_storage_empty,
    CUDA_TENSOR: _rebuild_cuda_tensor,
    Name("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _rebuild_cuda_tensor,
}
"""Every callable name in a pickle, with the function that reads the arguments."""

_DESCRIPTORS = (
    "the tensor is behind a file descriptor, which only children of its process can get",
    "Call torch.multiprocessing.set_sharing_strategy('file_system') before serialising tensors of a CPU.",
)

NAMES = Names(
    values={**_DTYPES, **{name: name for name in (*_TENSOR_CLASSES, *_STORAGE_CLASSES)}},
    constructors=CONSTRUCTORS,
    classes=frozenset([METADATA, *LOCAL_TENSORS]),
    unsupported={
        Name("multiprocessing.resource_sharer", "DupFd"): _DESCRIPTORS,
        Name(_REDUCTIONS, "rebuild_storage_fd"): _DESCRIPTORS,
        **{
            Name(module, name): (f"tensors of {name} are not read", "Send dense tensors on a CPU or a CUDA GPU.")
            for module, name in (
                (_REDUCTIONS, "rebuild_meta_tensor"),
                (_REDUCTIONS, "rebuild_nested_tensor"),
                (_REDUCTIONS, "rebuild_sparse_coo_tensor"),
                (_REDUCTIONS, "rebuild_sparse_compressed_tensor"),
                ("torch_npu.multiprocessing.reductions", "rebuild_npu_tensor"),
                ("sglang.srt.utils.patch_torch", "_rebuild_npu_tensor_modified"),
            )
        },
    },
)
"""Every accepted name in a pickle."""
