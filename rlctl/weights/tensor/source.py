"""The weights that a trainer may pass, as one interface: descriptions, and tensors in the same order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.tensor.checkpoint_names import ModuleSource
from rlctl.weights.tensor.finite import Held, local_values, shard_of
from rlctl.weights.tensor.tensors import TensorMeta, by_name, castable, refuse_unreadable
from rlctl.weights.tensor.tied_names import Spare, repeated

_SHOWN = 5

Entry = tuple[str, torch.Tensor] | list[tuple[str, torch.Tensor]]
"""A checkpoint name with its full tensor; or several that must travel together."""


@runtime_checkable
class WeightSource(Protocol):
    """Weights that can be iterated again and again.

    Where the trainer is distributed, every one of its ranks iterates, since gathering a tensor takes all of them.

    A source whose tensors keep their contents until the iteration has ended may say so with an attribute ``stable``
    that is true: what it yielded is then sent while it prepares what comes next. A source whose ranks can show what
    they hold without gathering has a method ``local`` (:class:`~rlctl.weights.tensor.finite.LocalSource`): without it,
    an update goes through the source once more to find values that are not finite.
    """

    def metas(self) -> list[TensorMeta]:
        """Every tensor's description: checkpoint name, dtype, full shape."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The full tensors with their names, in the order of :meth:`metas`.

        A tensor is done with when the next one is asked for, so its memory may be used again for that one.
        """


@runtime_checkable
class AtomicSource(WeightSource, Protocol):
    """A source of which some tensors are nothing without each other: a quantised weight and its scales."""

    def together(self) -> list[tuple[str, ...]]:
        """Names of tensors that must not be split over buckets; those of a list follow each other in the source."""


def is_stable(source: WeightSource) -> bool:
    """Whether the source says that its tensors keep their contents until the iteration has ended."""
    return bool(getattr(source, "stable", False))


Weights: TypeAlias = nn.Module | WeightSource | Iterable[Entry]
"""What a trainer may hand over."""


def as_source(weights: Weights) -> WeightSource:
    """A source over a module, an iterable of (name, tensor), or a source, which is returned as it is.

    A module's tensors come under the names of its checkpoint (see
    :class:`~rlctl.weights.tensor.checkpoint_names.ModuleSource`). The pairs of an iterable are collected (references,
    no copies), so that they can be gone through again; a DTensor is gathered when its turn comes. A list of pairs in
    place of one holds tensors that must travel together.

    Raises FIELD_INVALID when something else than (name, tensor) comes, a tensor without contents, or a name twice;
    UNSUPPORTED for a module whose checkpoint is not made of parts of its tensors.
    """
    if isinstance(weights, nn.Module):
        return ModuleSource(weights)
    if isinstance(weights, WeightSource):
        return weights
    return _Pairs([_pairs(entry) for entry in weights])


def as_offer(weights: Weights) -> WeightSource:
    """As :func:`as_source`, with tensors also under other names that they could have in a checkpoint: the names that
    are too many are those of :func:`spares_of`.
    """
    return ModuleSource(weights, spares=True) if isinstance(weights, nn.Module) else as_source(weights)


def spares_of(source: WeightSource) -> dict[str, Spare]:
    """Names of tensors that a source also gives under others, with these; see :func:`left_out`."""
    spares = getattr(source, "spares", None)
    return {} if spares is None else spares()


def left_out(spares: Mapping[str, Spare], wanted: Collection[str]) -> set[str]:
    """Names of an offer that are not sent, since ``wanted``, those of the checkpoint, has the contents under others.

    A spare name is sent where the checkpoint has it. The names that it stands for are then sent where that has them.
    Without ``wanted`` what the trainer gave itself is sent.
    """
    if not wanted:
        return {name for name, spare in spares.items() if not spare.explicit}
    standing = {other for name, spare in spares.items() if name in wanted for other in spare.stands_for}
    return {name for name in spares.keys() | standing if name not in wanted}


def atomic_lists(source: WeightSource) -> list[tuple[str, ...]]:
    """Names of what must not be split over buckets, list by list; none where the source says nothing about it."""
    return source.together() if isinstance(source, AtomicSource) else []


def in_lists(metas: Sequence[TensorMeta], lists: Iterable[tuple[str, ...]]) -> list[TensorMeta | list[TensorMeta]]:
    """What a source sends as :func:`rlctl.weights.tensor.buckets.plan` takes it: what must travel together in lists.

    ``metas`` are its tensors in its order, in the dtypes that they are sent in; ``lists`` its :func:`atomic_lists`.
    Raises FIELD_INVALID when tensors that belong together do not follow each other.
    """
    first = {names[0]: names for names in lists}
    entries: list[TensorMeta | list[TensorMeta]] = []
    position = 0
    while position < len(metas):
        names = first.get(metas[position].name, ())
        group = list(metas[position : position + max(1, len(names))])
        if names and tuple(meta.name for meta in group) != names:
            raise Reason.FIELD_INVALID.error(
                f"{', '.join(names)} belong together, but the source does not give them one after the other",
                field="weights",
            )
        entries.append(group if names else group[0])
        position += len(group)
    return entries


def as_announced(source: WeightSource, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
    """A source's tensors: each once, all of them, and as it has described them. ``dtypes``: what they are cast to.

    Raises FIELD_INVALID.
    """
    awaited = {meta.name: replace(meta, dtype=dtypes.get(meta.name, meta.dtype)) for meta in source.metas()}
    for name, tensor in source.tensors():
        if name not in awaited:
            raise unannounced(name)
        check_given(tensor, awaited.pop(name))
        yield name, tensor
    refuse_lacking(awaited)


def check_given(tensor: torch.Tensor, wire: TensorMeta) -> None:
    """Raise FIELD_INVALID for a tensor of another shape than was announced, one that a cast would ruin, one that is
    still spread over ranks, and for what is none.
    """
    if not isinstance(tensor, torch.Tensor):
        raise unfit(f"the source gives {type(tensor)} for {wire.name}; it must be a tensor")
    if hasattr(tensor, "full_tensor"):
        raise unfit(f"{wire.name} is a DTensor; a source gives full tensors: call its full_tensor() on every rank")
    refuse_unreadable(wire.name, tensor)
    if tuple(tensor.shape) != wire.shape:
        raise unfit(f"{wire.name} has shape {tuple(tensor.shape)}; {wire.shape} was announced")
    if not castable(tensor.dtype, wire.dtype):
        raise unfit(f"{wire.name} is {tensor.dtype}, and {wire.dtype} was announced: that takes more than a cast")


def refuse_lacking(names: Collection[str]) -> None:
    """Raise FIELD_INVALID when there are names that a source has announced and not given."""
    if names:
        shown = ", ".join(sorted(names)[:_SHOWN])
        raise unfit(f"the source lacks {len(names)} of the announced tensors: {shown}")


def unannounced(name: str) -> RlctlError:
    """What a source is told that gives a tensor which nobody awaits."""
    return unfit(f"the source yields {name!r}, which was not announced, or yields it twice")


def unfit(cause: str) -> RlctlError:
    """What a source is told whose tensors are not what it has announced."""
    return Reason.FIELD_INVALID.error(cause, field="weights")


def only(source: WeightSource, names: Collection[str]) -> WeightSource:
    """A source of just these tensors; going through it goes through all of the other, since gathering takes that."""
    return _Only(source, names) if {meta.name for meta in source.metas()}.difference(names) else source


class _Only:
    """Some tensors of a source; whole lists of what belongs together, or nothing of them."""

    def __init__(self, source: WeightSource, names: Collection[str]) -> None:
        self.stable = is_stable(source)
        self._source = source
        self._left_out = {meta.name for meta in source.metas()}.difference(names)

    def metas(self) -> list[TensorMeta]:
        return [meta for meta in self._source.metas() if meta.name not in self._left_out]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._source.tensors():
            if name not in self._left_out:
                yield name, tensor

    def together(self) -> list[tuple[str, ...]]:
        return [names for names in atomic_lists(self._source) if self._left_out.isdisjoint(names)]

    def local(self) -> Iterator[Held] | None:
        return local_values(self._source)


class _Pairs:
    """A source over tensors at hand."""

    stable = True

    def __init__(self, entries: list[list[tuple[str, torch.Tensor]]]) -> None:
        self._entries = entries
        by_name(self.metas(), field="weights")

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta.of(name, tensor) for entry in self._entries for name, tensor in entry]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in self._entries:
            for name, tensor in entry:
                gather = getattr(tensor, "full_tensor", None)
                yield name, (tensor if gather is None else gather()).detach()

    def together(self) -> list[tuple[str, ...]]:
        return [tuple(name for name, _ in entry) for entry in self._entries if len(entry) > 1]

    def spares(self) -> dict[str, Spare]:
        """Names under which a tensor comes again, as the tied ones of a ``state_dict`` do, with the first."""
        return repeated([pair for entry in self._entries if len(entry) == 1 for pair in entry])

    def local(self) -> Iterator[Held]:
        return (((name,), shard_of(tensor)) for entry in self._entries for name, tensor in entry)


def _pairs(entry: object) -> list[tuple[str, torch.Tensor]]:
    match entry:
        case [[_, _], *_] as several:
            return [_pair(pair) for pair in several]
    return [_pair(entry)]


def _pair(entry: object) -> tuple[str, torch.Tensor]:
    match entry:
        case (str(name), torch.Tensor() as tensor):
            refuse_unreadable(name, tensor)
            return name, tensor
    raise Reason.FIELD_INVALID.error(f"weights are pairs of name and tensor, not {type(entry)}", field="weights")
