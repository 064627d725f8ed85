"""Messages of checkpoint-engine's ``ParameterServer`` to an engine's rank, read as data without unpickling.

The first message is what torch's ``reduce_tensor`` returns for a buffer of bytes: a name and its arguments. Each later
one lists the tensors that lie in the buffer now, or is None, or is the error that ends the update. Written from
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
"""Argument of ``rebuild_cuda_tensor`` with the GPU's number, which another process counts differently."""

_ERROR = Name("builtins", "RuntimeError")


class Ended(Exception):
    """The parameter server ends the update; its message says why."""


def _error(arguments: tuple[Any, ...]) -> Ended:
    return Ended(*(str(argument)[:500] for argument in arguments))


_MESSAGES = Names(
    values=NAMES.values,
    constructors={SIZE: CONSTRUCTORS[SIZE], _ERROR: _error},
    classes=frozenset(),
    unsupported={},
)


def read_buffer(data: bytes, device: str, where: str) -> Tensor:
    """The buffer of the parameter server of one rank. ``device``: of that rank; ``where``: whose message it is.

    Raises FIELD_INVALID, UNSUPPORTED.
    """
    value = PickleReader(NAMES, Budget(), where).read(data)
    try:
        if type(value) is not tuple or len(value) != 2 or type(value[1]) is not tuple:
            raise ValueError("it is no handle of a tensor")
        name, arguments = value
        if type(name) is not Name or name not in CONSTRUCTORS:
            raise ValueError("it is no handle of a tensor")
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
    """The tensors that lie in the buffer; None: there are no more. Raises Ended, FIELD_INVALID."""
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
        cause, field=where, next_step="Send what checkpoint-engine's ParameterServer sends. Nothing else is read."
    )
