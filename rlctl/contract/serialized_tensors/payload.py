"""Reader of the serialised tensors in a request of SGLang's clients: one payload for each rank."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.contract.serialized_tensors.handles import (
    LOCAL_TENSORS,
    METADATA,
    NAMES,
    EmptyStorage,
    Storage,
    Tensor,
    dtype,
    is_instance,
    number,
    shape,
)
from rlctl.contract.serialized_tensors.pickle_reader import MOST_BYTES, Budget, PickleReader

FLATTENED = "flattened_bucket"
"""SGLang's ``load_format`` of a payload with one tensor of bytes and the place of each tensor in these bytes."""

MOST_TENSORS = 200_000
"""Most tensors of a payload."""


@dataclass(frozen=True)
class PlacedTensor:
    """A named tensor.

    Attributes:
        dtype: "torch.bfloat16".
        offset: bytes of the storage before the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Placed:
    """A storage and its tensors."""

    storage: Storage
    tensors: list[PlacedTensor]


def read_payloads(payloads: Sequence[str], load_format: str | None, field: str) -> list[list[Placed]]:
    """Return the storages and tensors of every rank, in the order of the payloads.

    ``payloads``: base64 of the results of SGLang's ``MultiprocessingSerializer``. ``field``: the payloads' field in the
    request. Raises FIELD_INVALID and UNSUPPORTED for refused content, with the payload's place.
    """
    if load_format not in (None, "", FLATTENED):
        raise Reason.UNSUPPORTED.error(
            f"load_format {load_format!r} names an engine's own loader",
            field="load_format",
            next_step=f"Leave it out, or send {FLATTENED!r}: tensors go by their checkpoint names.",
        )
    budget = Budget()
    return [
        _read(text, load_format == FLATTENED, rank, budget, f"{field}[{rank}]") for rank, text in enumerate(payloads)
    ]


def _read(text: str, flattened: bool, rank: int, budget: Budget, where: str) -> list[Placed]:
    reader = PickleReader(NAMES, budget, where)
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise reader.invalid(f"the payload has {len(text)} characters")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise reader.invalid("the payload is not base64") from None
    value = reader.read(data)
    try:
        tensors = _flattened(value) if flattened else _pairs(value, rank, budget, where)
    except ValueError as error:
        raise reader.invalid(str(error)) from None
    if len(tensors) > MOST_TENSORS:
        raise reader.invalid(f"the payload has {len(tensors)} tensors; the limit is {MOST_TENSORS}")
    for name, tensor in tensors:
        if tensor.offset % tensor.dtype.itemsize:
            raise reader.invalid(f"{shown(name)} begins at byte {tensor.offset}, no multiple of its dtype's size")
        if isinstance(tensor.storage, EmptyStorage) or not tensor.nbytes:
            raise reader.invalid(f"{shown(name)} has no elements")
    return _by_storage(tensors)


def _by_storage(tensors: Sequence[tuple[str, Tensor]]) -> list[Placed]:
    """Group tensors by storage. A storage that appears twice in the pickle has two references, and stays twice."""
    placed: dict[int, Placed] = {}
    for name, tensor in tensors:
        entry = placed.setdefault(id(tensor.storage), Placed(tensor.storage, []))
        entry.tensors.append(PlacedTensor(name, tensor.dtype.name, tensor.shape, tensor.offset))
    return list(placed.values())


def _flattened(value: Any) -> list[tuple[str, Tensor]]:
    if type(value) is not dict or value.keys() != {"flattened_tensor", "metadata"}:
        raise ValueError("the payload is no dict of flattened_tensor and metadata")
    buffer, entries = value["flattened_tensor"], value["metadata"]
    if type(buffer) is not Tensor or buffer.dtype.itemsize != 1 or len(buffer.shape) != 1:
        raise ValueError("flattened_tensor is not one dimension of bytes")
    if type(entries) is not list:
        raise ValueError("metadata is no list")
    tensors = []
    for entry in entries:
        if not is_instance(entry, frozenset([METADATA])):
            raise ValueError("metadata has an entry that is no FlattenedTensorMetadata")
        state = entry.state
        name = tensor_name(state.get("name"))
        kind, dims = dtype(state.get("dtype")), shape(state.get("shape"))
        start, end = number(state.get("start_idx"), "start_idx"), number(state.get("end_idx"), "end_idx")
        tensor = Tensor(kind, dims, buffer.offset + start, buffer.storage)
        if end - start != tensor.nbytes or end > buffer.nbytes:
            raise ValueError(f"{shown(name)} lies at bytes {start} to {end}, which do not fit its shape or the bucket")
        tensors.append((name, tensor))
    return tensors


def _pairs(value: Any, rank: int, budget: Budget, where: str) -> list[tuple[str, Tensor]]:
    if type(value) is dict:
        value = list(value.items())
    if type(value) is not list:
        raise ValueError("the payload is no list of names and tensors")
    tensors = []
    for pair in value:
        if type(pair) is not tuple or len(pair) != 2:
            raise ValueError("the payload has an entry that is no name and tensor")
        name, tensor = tensor_name(pair[0]), pair[1]
        if is_instance(tensor, LOCAL_TENSORS):
            tensor = _local(tensor.state.get("values"), rank, budget, where)
        if type(tensor) is not Tensor:
            raise ValueError(f"{shown(name)} is no tensor")
        tensors.append((name, tensor))
    return tensors


def _local(values: Any, rank: int, budget: Budget, where: str) -> Any:
    """Return a rank's tensor of a LocalSerializedTensor: a pickle within the pickle, without deeper nesting."""
    if type(values) is not list or rank >= len(values) or type(values[rank]) is not bytes:
        raise ValueError(f"a LocalSerializedTensor has no payload for rank {rank}")
    return PickleReader(NAMES, budget, where).read(values[rank])


def tensor_name(value: Any) -> str:
    """Return a tensor's name. Raises ValueError."""
    if type(value) is not str or not 0 < len(value) <= 1000:
        raise ValueError("a tensor's name is no text of 1 to 1000 characters")
    return value


def shown(name: str) -> str:
    """Return a name for error texts."""
    return repr(name[:100])
