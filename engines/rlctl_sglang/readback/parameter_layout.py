"""Which part of which checkpoint tensors each parameter of each rank is: found out, and proven. Pure.

SGLang fuses projections and cuts them over its ranks, and says nowhere how. What it does say are checksums of every
parameter at every rank (``/weights_checker``; on a CPU the first 8 bytes of the SHA-256 of the bytes, see
``tensor_hash`` in ``srt/managers/mm_utils.py``). While it holds a checkpoint that is known, each way to cut that is
thinkable either gives the checksums of all ranks or it does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlctl.weights.tensor.tensors import TensorMeta, as_bytes

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_VOCABULARY_ROWS = 64
"""SGLang pads vocabularies to a multiple of this (``VocabParallelEmbedding``)."""


@dataclass(frozen=True)
class Piece:
    """A range of indices of one dimension of a checkpoint tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Parameter:
    """A parameter at one rank: pieces of checkpoint tensors one after the other along ``dim``, then zeros.

    Attributes:
        name: the engine's.
        shape: at this rank.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int
    pieces: tuple[Piece, ...]

    def views(self, tensor: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The pieces inside the rank's tensor."""
        offset = 0
        for piece in self.pieces:
            length = piece.stop - piece.start
            yield piece, tensor.narrow(self.dim, offset, length)
            offset += length

    def checksum(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """What SGLang says of it when the checkpoint has these tensors."""
        held = torch.zeros(self.shape, dtype=self.dtype)
        for piece, view in self.views(held):
            view.copy_(tensors[piece.name].narrow(self.dim, piece.start, piece.stop - piece.start))
        return hashlib.sha256(as_bytes(held).numpy().data).hexdigest()[:16]


def find_out(
    checksums: Sequence[Mapping[str, str]],
    reference: Mapping[str, TensorMeta],
    read: Callable[[str], torch.Tensor],
) -> list[list[Parameter]]:
    """For each rank its parameters, in SGLang's order; empty when it cannot be found out.

    ``checksums``: each rank's, by parameter; ``reference`` and ``read``: the checkpoint that the ranks hold now.
    """
    ranks = len(checksums)
    names = list(checksums[0])
    if any(list(each) != names for each in checksums):
        return []
    found: list[list[Parameter]] = [[] for _ in checksums]
    left = set(reference)
    for name in names:
        sources = _sources(name, reference)
        if not sources or not left.issuperset(sources):
            return []
        left.difference_update(sources)
        tensors = {source: read(source) for source in sources}
        wanted = [each[name] for each in checksums]
        for cut in _cuts(name, [reference[source] for source in sources], ranks):
            if all(parameter.checksum(tensors) == told for parameter, told in zip(cut, wanted, strict=True)):
                for mine, parameter in zip(found, cut, strict=True):
                    mine.append(parameter)
                break
        else:
            return []
    return [] if left else found


class Joining:
    """Puts full tensors together from what the ranks hold of one parameter.

    Attributes:
        inconsistent: names of tensors of which ranks hold the same part, and not the same bytes.
    """

    def __init__(self, reference: Mapping[str, TensorMeta]) -> None:
        self._reference = reference
        self.inconsistent: set[str] = set()

    def join(self, parts: Sequence[tuple[Parameter, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The full tensors, by checkpoint name; ``parts``: the parameter as every rank holds it."""
        full: dict[str, torch.Tensor] = {}
        seen: set[Piece] = set()
        for parameter, tensor in parts:
            for piece, view in parameter.views(tensor):
                if piece.name not in full:
                    meta = self._reference[piece.name]
                    full[piece.name] = torch.empty(meta.shape, dtype=meta.dtype)
                place = full[piece.name].narrow(parameter.dim, piece.start, piece.stop - piece.start)
                if piece not in seen:
                    place.copy_(view)
                    seen.add(piece)
                elif not torch.equal(as_bytes(place), as_bytes(view)):
                    self.inconsistent.add(piece.name)
        return full


def _sources(name: str, reference: Mapping[str, TensorMeta]) -> list[str]:
    """The checkpoint tensors that a parameter may be made of."""
    if name in reference:
        return [name]
    for fused, parts in _FUSED.items():
        before, found, after = name.partition(f".{fused}.")
        sources = [f"{before}.{part}.{after}" for part in parts]
        if found and all(source in reference for source in sources):
            return sources
    return []


def _cuts(name: str, sources: Sequence[TensorMeta], ranks: int) -> Iterator[list[Parameter]]:
    """Ways in which ranks may hold these tensors, the parameter of each rank."""
    first = sources[0]
    if not first.shape or any((meta.dtype, meta.shape[1:]) != (first.dtype, first.shape[1:]) for meta in sources):
        return
    if len(sources) == 1:
        yield [_parameter(name, sources, 0, [(0, first.shape[0])])] * ranks
        padded = -(-first.shape[0] // _VOCABULARY_ROWS) * _VOCABULARY_ROWS
        rows = padded // ranks
        spans = [(min(r * rows, first.shape[0]), min((r + 1) * rows, first.shape[0])) for r in range(ranks)]
        yield [_parameter(name, sources, 0, [span], length=rows) for span in spans]
    for dim in range(len(first.shape) if len(sources) == 1 else 1):
        for copies in range(1, ranks + 1):
            # Where there are fewer heads of keys than ranks, several ranks hold the same ones.
            shares = [ranks, *([ranks // copies] * (len(sources) - 1))]
            if ranks % copies == 0 and not any(m.shape[dim] % n for m, n in zip(sources, shares, strict=True)):
                yield [
                    _parameter(
                        name,
                        sources,
                        dim,
                        [_share(m.shape[dim], n, rank * n // ranks) for m, n in zip(sources, shares, strict=True)],
                    )
                    for rank in range(ranks)
                ]


def _share(size: int, shares: int, number: int) -> tuple[int, int]:
    length = size // shares
    return number * length, (number + 1) * length


def _parameter(
    name: str, sources: Sequence[TensorMeta], dim: int, spans: Sequence[tuple[int, int]], *, length: int = 0
) -> Parameter:
    pieces = tuple(
        Piece(meta.name, start, stop) for meta, (start, stop) in zip(sources, spans, strict=True) if stop > start
    )
    shape = list(sources[0].shape)
    shape[dim] = length or sum(stop - start for start, stop in spans)
    return Parameter(name, sources[0].dtype, tuple(shape), dim, pieces)
