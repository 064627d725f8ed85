"""Tensors of several names: what is tied, and what a ``state_dict`` repeats of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rlctl.weights.finite import shard_of

_SAMPLE = 64
"""Elements that are compared before all of them are."""


@dataclass(frozen=True)
class Spare:
    """Why a name may be too much.

    Attributes:
        stands_for: names under which the same contents come usually.
        explicit: the trainer gave the tensor under this name itself.
    """

    stands_for: tuple[str, ...]
    explicit: bool = False


def repeated(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Spare]:
    """Names of tensors that lie in the memory of an earlier one, or are matrices of the same contents; with its name.

    Contents are compared of two matrices that are alone in having their shape, as an embedding and the head that is
    tied to it are.
    """
    found: dict[str, Spare] = {}
    places: dict[object, str] = {}
    alike: dict[object, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in named:
        own = shard_of(tensor)
        if own.numel() == 0 or own.is_meta or own.layout != torch.strided or not own.data_ptr():
            continue
        first = places.setdefault((own.device, own.data_ptr(), own.dtype, own.shape, own.stride()), name)
        if first != name:
            found[name] = Spare((first,), explicit=True)
        elif own.ndim == 2 and own is tensor:  # of a DTensor the other ranks' shards would have to be equal, too
            alike.setdefault((own.device, own.dtype, own.shape), []).append((name, own))
    for tensors in alike.values():
        if len(tensors) == 2 and _equal(tensors[0][1], tensors[1][1]):
            found[tensors[1][0]] = Spare((tensors[0][0],), explicit=True)
    return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    sample = one[0, :_SAMPLE], other[0, :_SAMPLE]
    constant = bool((sample[0] == sample[0][0]).all())  # zeros are no sign of a tie
    return not constant and torch.equal(*sample) and torch.equal(one, other)
