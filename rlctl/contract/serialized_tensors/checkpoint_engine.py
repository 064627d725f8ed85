"""Messages of checkpoint-engine's ``ParameterServer`` to an engine's rank, read as data without unpickling.

The first message is the result of torch's ``reduce_tensor`` for a buffer of bytes: a name and its arguments. Each later
message lists the tensors in the buffer, or is None, or is the error that ends the update. Written from
checkpoint-engine 59a3c4f (``ps.py``, ``worker.py``).
"""

from __future__ import annotations

from typing import Any

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.serialized_tensors.handles import (
    CONSTRUCTORS,
    CUDA_TENSOR,
    NAMES,
    SIZE,
    EmptyStorage,
    Tensor,
    dtype,
    number,
    shape,
)
from rlctl.contract.serialized_tensors.payload import MOST_TENSORS, Placed, PlacedTensor, shown, tensor_name
from rlctl.contract.serialized_tensors.pickle_reader import Budget, Name, Names, PickleReader

_DEVICE = 6
"""Argument of ``rebuild_cuda_tensor`` with the GPU's number, counted differently by another process."""

_ERROR = Name("builtins", "RuntimeError")


class Ended(Exception):
    """The parameter server ends the update; the message gives the reason."""


def _error(arguments: tuple[Any, ...]) -> Ended:
    return Ended(*(str(argument)[:500] for argument in arguments))


_MESSAGES = Names(
    values=NAMES.values,
    constructors={SIZE: CONSTRUCTORS[SIZE], _ERROR: _error},
    classes=frozenset(),
    unsupported={},
)


def read_buffer(data: bytes, device: str, where: str) -> Tensor:
    """Return the buffer of a rank's parameter server. ``device``: the rank's; ``where``: for errors.

    Raises FIELD_INVALID, UNSUPPORTED.
    """
    value = PickleReader(NAMES, Budget(), where).read(data)
    try:
        if type(value) is not tuple or len(value) != 2 or type(value[1]) is not tuple:
            raise ValueError("the value is no handle of a tensor")
        name, arguments = value
        if type(name) is not Name or name not in CONSTRUCTORS:
            raise ValueError("the value is no handle of a tensor")
        if name == CUDA_TENSOR and len(arguments) > _DEVICE:
            arguments = (*arguments[:_DEVICE], device, *arguments[_DEVICE + 1 :])
        buffer = CONSTRUCTORS[name](arguments)
        if type(buffer) is not Tensor or buffer.dtype.name != "torch.uint8" or len(buffer.shape) != 1:
            raise ValueError("the buffer is not one dimension of bytes")
        if isinstance(buffer.storage, EmptyStorage) or not buffer.nbytes:
            raise ValueError("the buffer is empty")
    except ValueError as error:
        raise _invalid(str(error), where) from None
    return buffer


def read_bucket(data: bytes, buffer: Tensor, where: str) -> Placed | None:
    """Return the tensors in the buffer, or None after the last message. Raises Ended, FIELD_INVALID."""
    value = PickleReader(_MESSAGES, Budget(), where).read(data)
    if value is None:
        return None
    if isinstance(value, Ended):
        raise value
    try:
        if type(value) is not list or len(value) > MOST_TENSORS:
            raise ValueError(f"the message is no list of at most {MOST_TENSORS} tensors")
        return Placed(buffer.storage, [_tensor(entry, buffer) for entry in value])
    except ValueError as error:
        raise _invalid(str(error), where) from None


def _tensor(entry: Any, buffer: Tensor) -> PlacedTensor:
    if type(entry) is not dict or entry.keys() != {"name", "dtype", "shape", "offset"}:
        raise ValueError("a tensor has other fields than name, dtype, shape and offset")
    name, kind, dims = tensor_name(entry["name"]), dtype(entry["dtype"]), shape(entry["shape"])
    start = number(entry["offset"], "offset")
    tensor = Tensor(kind, dims, buffer.offset + start, buffer.storage)
    if start + tensor.nbytes > buffer.nbytes:
        raise ValueError(f"{shown(name)} reaches beyond the buffer")
    if tensor.offset % kind.itemsize:
        raise ValueError(f"{shown(name)} begins at byte {tensor.offset}, no multiple of its dtype's size")
    if not tensor.nbytes:
        raise ValueError(f"{shown(name)} has no elements")
    return PlacedTensor(name, kind.name, dims, tensor.offset)


def _invalid(cause: str, where: str) -> RlctlError:
    return Reason.FIELD_INVALID.error(
        cause, field=where, next_step="Only the payloads of checkpoint-engine's ParameterServer are read."
    )
