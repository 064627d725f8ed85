"""Arithmetic of the slices of full tensors at the ranks of a stage, without memory or exchange.

Every rank derives the same answers from the same facts: the owner that digests a tensor, the bytes of each gather step,
and the sending ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlctl.contract.errors import Reason
from rlctl.weights.tensor.tensors import TensorMeta

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Slice:
    """A part of a full tensor: ``full.narrow(dim, start, length)``.

    Attributes:
        dim: dimension that is cut; None: the whole tensor (``start`` and ``length`` have no meaning).
        start: first index.
        length: number of indices.
    """

    dim: int | None = None
    start: int = 0
    length: int = 0

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        if self.dim is None:
            return full
        return (*full[: self.dim], self.length, *full[self.dim + 1 :])

    def fits(self, full: tuple[int, ...]) -> bool:
        if self.dim is None:
            return True
        inside = 0 <= self.dim < len(full) and self.start >= 0 and self.length >= 0
        return inside and self.start + self.length <= full[self.dim]

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return the part of this tensor, sharing its memory. Raises FIELD_INVALID if the tensor has no such part."""
        if not self.fits(tuple(full.shape)):
            raise Reason.FIELD_INVALID.error(f"a tensor of shape {tuple(full.shape)} has no part {self}")
        return full if self.dim is None else full.narrow(self.dim, self.start, self.length)

    def whole(self, full: tuple[int, ...]) -> bool:
        return self.dim is None or self.length == full[self.dim]


@dataclass
class Shard:
    """The part of a checkpoint tensor at a rank.

    Attributes:
        meta: the full tensor: checkpoint name, the reference's dtype, full shape.
        local: the memory of the part: a parameter, or a view into a parameter (such as a fused qkv).
        slice: the part.
    """

    meta: TensorMeta
    local: torch.Tensor
    slice: Slice = field(default_factory=Slice)


@dataclass(frozen=True)
class Block:
    """Rows (indices of dimension 0) of a full tensor that are gathered in one step."""

    start: int
    length: int


@dataclass(frozen=True)
class Piece:
    """A part of a tensor and the ranks with a copy.

    Attributes:
        slice: the part.
        holders: ranks, ascending; the first rank sends the part.
    """

    slice: Slice
    holders: tuple[int, ...]


class Spread:
    """The distribution of a tensor over the ranks: whole at each holder, or pieces that tile the tensor.

    Attributes:
        meta: the full tensor.
        pieces: in order, without gap or overlap; a single whole piece, or several.
    """

    def __init__(self, meta: TensorMeta, parts: Mapping[int, Slice]) -> None:
        """Create a spread from the parts by rank. Raises INTERNAL if the parts do not tile the tensor."""
        self.meta = meta
        holders: dict[Slice, list[int]] = {}
        for rank in sorted(parts):
            part = Slice() if parts[rank].whole(meta.shape) else parts[rank]
            if part.dim is None or part.length:
                holders.setdefault(part, []).append(rank)
        ordered = sorted(holders, key=lambda part: part.start)
        self.pieces = [Piece(part, tuple(holders[part])) for part in ordered]
        if not self._tiled():
            raise Reason.INTERNAL.error(
                f"{meta.name}: the ranks' slices do not make up its shape {meta.shape}: {dict(parts)}"
            )

    @property
    def whole(self) -> bool:
        """Whether every rank with the tensor has all of it."""
        return self.pieces[0].slice.dim is None

    def blocks(self, max_bytes: int) -> Iterator[Block]:
        """Yield blocks of rows of a divided tensor, of at most ``max_bytes`` each, or of one larger row."""
        if not self.meta.nbytes:
            return
        rows = self.meta.shape[0]
        length = max(1, max_bytes * rows // self.meta.nbytes)
        for start in range(0, rows, length):
            yield Block(start, min(length, rows - start))

    def rows(self, piece: Piece, block: Block) -> Block:
        """Return the rows of a piece in a block, counted within the piece; possibly none."""
        if piece.slice.dim != 0:
            return block
        start = max(block.start, piece.slice.start)
        stop = min(block.start + block.length, piece.slice.start + piece.slice.length)
        return Block(start - piece.slice.start, max(0, stop - start))

    def nbytes(self, piece: Piece, block: Block) -> int:
        """Return the size in bytes of a piece's part of a block, in the reference's dtype."""
        columns = piece.slice.shape(self.meta.shape)[1:]
        return self.rows(piece, block).length * math.prod(columns) * self.meta.dtype.itemsize

    def runs(self, block: Block) -> int:
        """Return the number of contiguous byte runs of a piece's part of a block in the full tensor."""
        dim = self.pieces[0].slice.dim
        return block.length * math.prod(self.meta.shape[1:dim]) if dim else 1

    def _tiled(self) -> bool:
        if any(piece.slice.dim is None for piece in self.pieces):
            return len(self.pieces) == 1
        dims = {piece.slice.dim for piece in self.pieces}
        end = 0
        for piece in self.pieces:
            if piece.slice.start != end:
                return False
            end += piece.slice.length
        dim = dims.pop() if len(dims) == 1 else None
        return dim is not None and end == self.meta.shape[dim]


def owners(spreads: Mapping[str, Spread], size: int) -> dict[str, int]:
    """Return the owner of each tensor by name: in sorted order, distributed over the ranks by bytes.

    The owners of whole tensors rotate among the holders, since each holder digests the tensor in any case.
    """
    load = [0] * size
    owner: dict[str, int] = {}
    for index, name in enumerate(sorted(spreads)):
        spread = spreads[name]
        if spread.whole:
            holders = spread.pieces[0].holders
            owner[name] = holders[index % len(holders)]
        else:
            owner[name] = load.index(min(load))
            load[owner[name]] += spread.meta.nbytes
    return owner
