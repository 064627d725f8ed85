"""The interface of the weights that a trainer passes: descriptions, and tensors in the same order."""

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
"""A checkpoint name with its full tensor; or an atomic list of such pairs."""


@runtime_checkable
class WeightSource(Protocol):
    """Weights that can be iterated repeatedly.

    Every rank of a distributed trainer iterates, since all ranks take part in gathering a tensor.

    The optional attribute ``stable`` is true if tensors keep their contents until the iteration ends. A stable source
    can prepare the next tensor while the last tensor is sent. The optional method ``local``
    (:class:`~rlctl.weights.tensor.finite.LocalSource`) exposes a rank's values without gathering. Without ``local``, an
    update makes a further pass to find values that are not finite.
    """

    def metas(self) -> list[TensorMeta]:
        """Return every tensor's description: checkpoint name, dtype, full shape."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full tensors with their names, in the order of :meth:`metas`.

        A consumer is done with a tensor when it asks for the next tensor, so the memory may be reused.
        """


@runtime_checkable
class AtomicSource(WeightSource, Protocol):
    """A source with atomic lists, such as a quantised weight and its scales."""

    def together(self) -> list[tuple[str, ...]]:
        """Return the names of each atomic list. The tensors of a list are adjacent in the source."""


def is_stable(source: WeightSource) -> bool:
    """Return whether the source declares that its tensors keep their contents until the iteration ends."""
    return bool(getattr(source, "stable", False))


Weights: TypeAlias = nn.Module | WeightSource | Iterable[Entry]
"""The types of weights that a trainer may pass."""


def as_source(weights: Weights) -> WeightSource:
    """Return a source over a module or an iterable of (name, tensor). A source is returned unchanged.

    A module's tensors have the names of its checkpoint (see
    :class:`~rlctl.weights.tensor.checkpoint_names.ModuleSource`). The pairs of an iterable are collected (references,
    no copies) for repeated iteration; a DTensor is gathered at its turn. A list of pairs is an atomic list.

    Raises FIELD_INVALID for an entry that is not (name, tensor), a tensor without contents, or a repeated name;
    UNSUPPORTED for a module whose checkpoint does not consist of parts of its tensors.
    """
    if isinstance(weights, nn.Module):
        return ModuleSource(weights)
    if isinstance(weights, WeightSource):
        return weights
    return _Pairs([_pairs(entry) for entry in weights])


def as_offer(weights: Weights) -> WeightSource:
    """Return a source as :func:`as_source`, with tensors also under their other possible checkpoint names.

    :func:`spares_of` has the surplus names.
    """
    return ModuleSource(weights, spares=True) if isinstance(weights, nn.Module) else as_source(weights)


def spares_of(source: WeightSource) -> dict[str, Spare]:
    """Return the spare names of a source's tensors with the usual names; see :func:`left_out`."""
    spares = getattr(source, "spares", None)
    return {} if spares is None else spares()


def left_out(spares: Mapping[str, Spare], checkpoint_names: Collection[str]) -> set[str]:
    """Return the names of an offer that are not sent, because the checkpoint has the contents under other names.

    A spare name is sent if the checkpoint has it. Its usual names are then sent only if the checkpoint has them.
    Without ``checkpoint_names`` the names that the trainer itself used are sent.
    """
    if not checkpoint_names:
        return {name for name, spare in spares.items() if not spare.explicit}
    usual_names = {usual for name, spare in spares.items() if name in checkpoint_names for usual in spare.stands_for}
    return {name for name in spares.keys() | usual_names if name not in checkpoint_names}


def atomic_lists(source: WeightSource) -> list[tuple[str, ...]]:
    """Return the names of each atomic list of a source; none for a source without such lists."""
    return source.together() if isinstance(source, AtomicSource) else []


def in_lists(metas: Sequence[TensorMeta], lists: Iterable[tuple[str, ...]]) -> list[TensorMeta | list[TensorMeta]]:
    """Arrange a source's tensors for :func:`rlctl.weights.tensor.buckets.plan`: atomic lists as lists.

    ``metas`` are the tensors in the source's order, in wire dtypes; ``lists`` are its :func:`atomic_lists`. Raises
    FIELD_INVALID if the tensors of a list are not adjacent.
    """
    first = {names[0]: names for names in lists}
    entries: list[TensorMeta | list[TensorMeta]] = []
    position = 0
    while position < len(metas):
        names = first.get(metas[position].name, ())
        group = list(metas[position : position + max(1, len(names))])
        if names and tuple(meta.name for meta in group) != names:
            raise Reason.FIELD_INVALID.error(
                f"{', '.join(names)} belong together, but the source does not yield them in a row",
                field="weights",
            )
        entries.append(group if names else group[0])
        position += len(group)
    return entries


def as_announced(source: WeightSource, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a source's tensors, each once, and all as described by the source; ``dtypes`` are the wire dtypes.

    Raises FIELD_INVALID for an unannounced, repeated, missing or unfit tensor.
    """
    awaited = {meta.name: replace(meta, dtype=dtypes.get(meta.name, meta.dtype)) for meta in source.metas()}
    for name, tensor in source.tensors():
        if name not in awaited:
            raise unannounced(name)
        check_given(tensor, awaited.pop(name))
        yield name, tensor
    refuse_lacking(awaited)


def check_given(tensor: torch.Tensor, wire: TensorMeta) -> None:
    """Raise FIELD_INVALID for a value that cannot be sent as ``wire``.

    Such a value is not a tensor, is a DTensor, has no contents, has a different shape, or would lose values in a cast.
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
    """Raise FIELD_INVALID if a source has not yielded announced names."""
    if names:
        examples = ", ".join(sorted(names)[:_SHOWN])
        raise unfit(f"the source lacks {len(names)} of the announced tensors: {examples}")


def unannounced(name: str) -> RlctlError:
    return unfit(f"the source yields {name!r}, which was not announced, or yields it twice")


def unfit(cause: str) -> RlctlError:
    return Reason.FIELD_INVALID.error(cause, field="weights")


def only(source: WeightSource, names: Collection[str]) -> WeightSource:
    """Return a source of these tensors only. Its iteration iterates the whole source, since gathering needs that."""
    return _Only(source, names) if {meta.name for meta in source.metas()}.difference(names) else source


class _Only:
    """Some tensors of a source. An atomic list is included as a whole or not at all."""

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
    """A source over tensors in memory."""

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
        """Return the names of repeated tensors, such as tied tensors of a ``state_dict``, each with the first name."""
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
    raise Reason.FIELD_INVALID.error(
        f"weights are pairs of name and tensor, not {type(entry)}",
        field="weights",
        next_step="Pass a module, or the items() of a state dict.",
    )
