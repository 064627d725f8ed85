"""Tensors with several names: tied tensors, and their repetitions in a ``state_dict``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rlctl.weights.tensor.finite import shard_of

_SAMPLE = 64
"""Number of elements of the first comparison."""


@dataclass(frozen=True)
class Spare:
    """A further name of a tensor.

    Attributes:
        stands_for: usual names of the same contents.
        explicit: the trainer itself uses this name.
    """

    stands_for: tuple[str, ...]
    explicit: bool = False


def repeated(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Spare]:
    """Return the names of tensors that share the memory or the contents of an earlier tensor, with its name.

    Contents are compared only if exactly two matrices have the same shape, as an embedding and its tied head do.
    """
    spares: dict[str, Spare] = {}
    places: dict[object, str] = {}
    candidates: dict[object, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        shard = shard_of(tensor)
        if shard.numel() == 0 or shard.is_meta or shard.layout != torch.strided or not shard.data_ptr():
            continue
        first = places.setdefault((shard.device, shard.data_ptr(), shard.dtype, shard.shape, shard.stride()), name)
        if first != name:
            spares[name] = Spare((first,), explicit=True)
        elif shard.ndim == 2 and shard is tensor:  # no DTensor: its other shards may differ
            candidates.setdefault((shard.device, shard.dtype, shard.shape), []).append((name, shard))
    for tensors in candidates.values():
        if len(tensors) == 2 and _equal(tensors[0][1], tensors[1][1]):
            spares[tensors[1][0]] = Spare((tensors[0][0],), explicit=True)
    return spares


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    sample = one[0, :_SAMPLE], other[0, :_SAMPLE]
    constant = bool((sample[0] == sample[0][0]).all())  # equal zeros are no sign of a tie
    return not constant and torch.equal(*sample) and torch.equal(one, other)
