"""An assembler of pickles: names and calls as bytes, without the named modules."""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Global:
    """A name of a module."""

    module: str
    name: str


@dataclass(frozen=True)
class Call:
    """A call of a name."""

    function: Global
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class New:
    """An instance of a class with attributes."""

    cls: Global
    state: dict[str, Any]


def assemble(value: Any, protocol: int = 4) -> bytes:
    """Return the pickle of a value."""
    return bytes([0x80, protocol]) + _code(value, protocol) + b"."


def encoded(value: Any, protocol: int = 4) -> str:
    """Return the pickle of a value in base64, in the form of requests."""
    return base64.b64encode(assemble(value, protocol)).decode()


def _code(value: Any, protocol: int) -> bytes:
    def code(inner: Any) -> bytes:
        return _code(inner, protocol)

    match value:
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(data)]) + data
        case str():
            data = value.encode()
            return b"X" + struct.pack("<I", len(data)) + data
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
        case tuple():
            return b"(" + b"".join(map(code, value)) + b"t"
        case list():
            return b"](" + b"".join(map(code, value)) + b"e"
        case dict():
            return b"}(" + b"".join(code(key) + code(inner) for key, inner in value.items()) + b"u"
        case Global() if protocol < 4:
            return f"c{value.module}\n{value.name}\n".encode()
        case Global():
            return code(value.module) + code(value.name) + b"\x93"
        case Call():
            return code(value.function) + code(value.arguments) + b"R"
        case New():
            return code(value.cls) + b")\x81" + code(value.state) + b"b"
    raise TypeError(type(value).__name__)


REDUCTIONS = "torch.multiprocessing.reductions"
TENSOR = Global("torch", "Tensor")
UUID = "GPU-5b1f0f4e-0000-1111-2222-333344445555"


def size(*dims: int) -> Call:
    return Call(Global("torch", "Size"), (dims,))


def cuda_tensor(
    *dims: int,
    strides: tuple[int, ...] | None = None,
    kind: str = "uint8",
    device: Any = UUID,
    modified: bool = True,
    **other: Any,
) -> Call:
    """Return a tensor on a GPU in the form of torch 2.13's ``reduce_tensor``, with a UUID from SGLang's patch."""
    steps = [1]
    for dim in reversed(dims[1:]):
        steps.append(steps[-1] * dim)
    values = {
        "cls": TENSOR,
        "size": size(*dims),
        "stride": tuple(reversed(steps)) if strides is None else strides,
        "offset": 0,
        "storage_cls": Global("torch.storage", "TypedStorage"),
        "dtype": Global("torch", kind),
        "device": device,
        "handle": b"\x01c" + b"h" * 64,
        "storage_size": 4096,
        "storage_offset": 512,
        "requires_grad": False,
        "ref_counter": b"/torch_77_88_9",
        "ref_counter_offset": 3,
        "event": b"e" * 64,
        "event_sync": True,
    }
    assert other.keys() <= values.keys()
    name = Global("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")
    return Call(name if modified else Global(REDUCTIONS, "rebuild_cuda_tensor"), tuple((values | other).values()))


def shared_tensor(*dims: int, nbytes: int, name: str = "/torch_1_2_3", kind: str = "float32", offset: int = 0) -> Call:
    """Return a tensor in shared memory in the form of torch's strategy ``file_system``."""
    steps = [1]
    for dim in reversed(dims[1:]):
        steps.append(steps[-1] * dim)
    storage = Call(
        Global(REDUCTIONS, "rebuild_storage_filename"),
        (Global("torch.storage", "UntypedStorage"), b"/tmp/torch-shm-dir-aB3dE6/manager.sock", name.encode(), nbytes),
    )
    typed = Call(Global(REDUCTIONS, "rebuild_typed_storage"), (storage, Global("torch", kind)))
    return Call(
        Global(REDUCTIONS, "rebuild_tensor"), (TENSOR, typed, (offset, size(*dims), tuple(reversed(steps)), False))
    )


def metadata(name: str, kind: str, dims: tuple[int, ...], start: int, end: int) -> New:
    """Return the entry of one tensor of a flattened bucket."""
    state = {
        "name": name,
        "shape": size(*dims),
        "dtype": Global("torch", kind),
        "start_idx": start,
        "end_idx": end,
        "numel": end - start,
    }
    return New(Global("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"), state)
