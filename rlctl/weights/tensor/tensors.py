"""Names, dtypes, shapes and bytes of tensors: the vocabulary of the data plane.

Digests, buckets and broadcasts work on a tensor's raw bytes in C order. Only this module converts a tensor to bytes,
for every dtype (including float8 and bool), and for 0-d and empty tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from rlctl.contract.errors import Reason
from rlctl.v1 import verbs_pb2

_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}

_DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype) and dtype not in _QUANTISED
}
"""Every dtype whose tensors can be viewed as bytes, by name; with torch's aliases ("half", "float")."""


@dataclass(frozen=True)
class TensorMeta:
    """Description of a tensor without its contents.

    Attributes:
        name: checkpoint name.
        dtype: dtype of the elements.
        shape: full shape; ``()`` for a 0-d tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorMeta:
        return cls(name, tensor.dtype, tuple(tensor.shape))


def dtype_name(dtype: torch.dtype) -> str:
    """Format a dtype as in digests and messages: "torch.bfloat16"."""
    return str(dtype)


def parse_dtype(name: str, field: str = "") -> torch.dtype:
    """Parse the name of a dtype: "torch.bfloat16" or "bfloat16".

    Raises FIELD_INVALID, with ``field``, for a name unknown to torch or a quantised dtype without plain bytes.
    """
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise Reason.FIELD_INVALID.error(f"{name!r} is no dtype of a tensor", field=field)
    return dtype


def to_proto(meta: TensorMeta) -> verbs_pb2.TensorInfo:
    return verbs_pb2.TensorInfo(name=meta.name, dtype=dtype_name(meta.dtype), shape=verbs_pb2.Shape(dims=meta.shape))


def from_proto(message: verbs_pb2.TensorInfo) -> TensorMeta:
    """Parse a description. Raises FIELD_INVALID for an unknown dtype."""
    return TensorMeta(message.name, parse_dtype(message.dtype), tuple(message.shape.dims))


def castable(source: torch.dtype, reference: torch.dtype) -> bool:
    """Return whether values survive a cast: floats of 16 bits and more.

    Narrower floats, and integers, carry scales or codes.
    """
    if source == reference:
        return True
    return all(dtype.is_floating_point and dtype.itemsize >= 2 for dtype in (source, reference))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in C order: 1-d, uint8, on the tensor's device.

    A contiguous tensor shares memory with the result (writes go through). Any other tensor is copied.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1)
    # A single element counts as contiguous with any stride, but its bytes cannot be viewed with that stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def refuse_unreadable(name: str, tensor: torch.Tensor) -> None:
    """Raise FIELD_INVALID for a tensor without contents (on the meta device) or with a non-strided layout."""
    if tensor.is_meta or tensor.layout != torch.strided:
        problem = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise Reason.FIELD_INVALID.error(
            f"{name} is {problem}: it has no contents to send",
            field="weights",
            next_step="Pass a tensor with contents: load offloaded tensors first.",
        )


def by_name(metas: Iterable[TensorMeta], *, field: str = "") -> Mapping[str, TensorMeta]:
    """Return the descriptions by name. Raises FIELD_INVALID for a repeated name."""
    result: dict[str, TensorMeta] = {}
    for meta in metas:
        if meta.name in result:
            raise Reason.FIELD_INVALID.error(f"the tensor {meta.name!r} appears twice", field=field)
        result[meta.name] = meta
    return result
