"""Check for NaN and infinite values: the weights of a diverged training step.

A tensor is checked in its wire dtype. A finite value in float32 may be infinite in float16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.tensor.tensors import as_bytes, castable, dtype_name

_SHOWN = 5

_CHUNK = 1 << 24
"""Bytes that are checked at a time, to keep temporary tensors small."""

_BAD_BITS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.float8_e4m3fn": lambda bits: (bits & 0x7F) == 0x7F,
    "torch.float8_e5m2": lambda bits: (bits & 0x7F) >= 0x7C,
    "torch.float8_e4m3fnuz": lambda bits: bits == 0x80,
    "torch.float8_e5m2fnuz": lambda bits: bits == 0x80,
    "torch.float8_e8m0fnu": lambda bits: bits == 0xFF,
}
"""Tests for bytes that are NaN or infinite, by dtype. Other dtypes of one byte have no such values."""

Held = tuple[tuple[str, ...], torch.Tensor]
"""Checkpoint names, and a tensor with values of the tensors of these names."""


@runtime_checkable
class LocalSource(Protocol):
    """A source that exposes the shards of this rank, without gathering."""

    def local(self) -> Iterator[Held] | None:
        """Return all shards of this rank, or None if the source (or a wrapped source) can only gather."""


def local_values(source: object) -> Iterator[Held] | None:
    """Return the shards of this rank, or None if the source can only gather."""
    return source.local() if isinstance(source, LocalSource) else None


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's part on this rank, or any other tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def is_finite(tensor: torch.Tensor, wire: torch.dtype | None = None) -> bool:
    """Return whether all values are finite.

    With ``wire``, the values must be finite after the cast to that dtype too, if both are floats of 16 bits or more.
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point() or values.numel() == 0:
        return True
    if values.dtype.itemsize == 1:
        return _narrow_is_finite(values)
    extremes = torch.stack(torch.aminmax(values))  # NaN propagates to both
    if wire is not None and wire.is_floating_point and castable(tensor.dtype, wire):
        extremes = extremes.to(wire)
    return bool(extremes.isfinite().all())


def _narrow_is_finite(values: torch.Tensor) -> bool:
    """Check dtypes of one byte by their bits: torch has no aminmax for them, and widens them slowly."""
    bad = _BAD_BITS.get(dtype_name(values.dtype))
    return bad is None or not any(bool(bad(part).any()) for part in torch.split(as_bytes(values), _CHUNK))


def not_finite(entries: Iterable[Held], dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Return the names in ``dtypes`` of tensors with a value that is not finite."""
    names_not_finite = []
    for names, tensor in entries:
        selected = [name for name in names if name in dtypes]
        if selected and not is_finite(tensor, dtypes[selected[0]]):
            names_not_finite += selected
    return names_not_finite


def refusal(names: Collection[str], total: int) -> RlctlError:
    ordered = sorted(set(names))
    examples = ", ".join(ordered[:_SHOWN]) + (", ..." if len(ordered) > _SHOWN else "")
    return Reason.WEIGHTS_NOT_FINITE.error(
        f"{len(ordered)} of {total} tensors hold NaN or infinite values in the dtype of the checkpoint: {examples}",
        field="weights",
        metadata={"tensor": ordered[0], "count": str(len(ordered))},
    )
