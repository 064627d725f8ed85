"""Gathers full tensors at one rank of a stage, for any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.shards.rank_exchange import Exchange
from rlctl.weights.tensor.slices import Block, Shard, Slice, Spread
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, dtype_name, parse_dtype

Job = tuple[str, Block]
"""Rows of a full tensor, by its checkpoint name."""

_NOTHING = torch.empty(0, dtype=torch.uint8)


def parts_held(shards: Mapping[str, Shard]) -> dict[str, list[Any]]:
    """Describe a rank's parts for other ranks: [dtype, full shape, dim, start, length] by name."""
    return {
        name: [dtype_name(shard.meta.dtype), shard.meta.shape, shard.slice.dim, shard.slice.start, shard.slice.length]
        for name, shard in shards.items()
    }


class Gathering:
    """The distribution of a stage's tensors over its ranks. All ranks create it and call every method together.

    Attributes:
        spreads: by checkpoint name, in sorted order; the same at every rank.
    """

    def __init__(self, shards: Mapping[str, Shard], exchange: Exchange) -> None:
        """Exchange the distribution. Raises INTERNAL if the ranks' shard maps contradict each other, GROUP_FAILED."""
        self._shards = shards
        self._exchange = exchange
        self.spreads = self._agree()

    def full(self, name: str, owner: int = 0) -> torch.Tensor | None:
        """Return the full tensor in the reference's dtype, C order, at ``owner``; None elsewhere."""
        spread = self.spreads[name]
        if spread.whole and owner in spread.pieces[0].holders:
            if self._exchange.rank != owner:
                return None
            return self._shards[name].local.detach().to(spread.meta.dtype).contiguous()
        rows = spread.meta.shape[0] if spread.meta.shape else 1
        gathered = self.gather([(name, Block(0, rows))], owner)
        if gathered is None:
            return None
        data = torch.cat([block.reshape(-1) for block in gathered[name]])
        return data.view(spread.meta.dtype).reshape(spread.meta.shape)

    def gather(self, batch: Sequence[Job], owner: int) -> dict[str, list[torch.Tensor]] | None:
        """Bring blocks of full tensors to their owner; return the bytes by tensor there, None elsewhere."""
        sizes = [0] * self._exchange.size
        local_parts: list[torch.Tensor] = []
        for name, block in batch:
            spread = self.spreads[name]
            for piece in spread.pieces:
                size = spread.nbytes(piece, block)
                sizes[piece.holders[0]] += size
                if piece.holders[0] == self._exchange.rank and size:
                    rows = spread.rows(piece, block)
                    local = self._shards[name].local.detach()
                    part = local.reshape(local.shape or (1,)).narrow(0, rows.start, rows.length)
                    local_parts.append(as_bytes(part.to(spread.meta.dtype)))
        parts = self._exchange.gather(torch.cat(local_parts) if local_parts else _NOTHING, sizes, owner)
        if parts is None:
            return None
        gathered: dict[str, list[torch.Tensor]] = {}
        ends = [0] * self._exchange.size
        for name, block in batch:
            spread = self.spreads[name]
            pieces = []
            for piece in spread.pieces:
                holder, size = piece.holders[0], spread.nbytes(piece, block)
                if size:
                    part = parts[holder][ends[holder] : ends[holder] + size]
                    # A piece cut along an inner dimension has a run of bytes in every outer index of the full tensor.
                    pieces.append(part.reshape(spread.runs(block), -1))
                    ends[holder] += size
            gathered.setdefault(name, []).append(torch.cat(pieces, dim=1) if pieces else _NOTHING)
        return gathered

    def _agree(self) -> dict[str, Spread]:
        metas: dict[str, TensorMeta] = {}
        parts: dict[str, dict[int, Slice]] = {}
        for rank, answer in enumerate(self._exchange.all_gather_bytes(json.dumps(parts_held(self._shards)).encode())):
            for name, (dtype, shape, dim, start, length) in json.loads(answer).items():
                meta = TensorMeta(name, parse_dtype(dtype), tuple(shape))
                if metas.setdefault(name, meta) != meta:
                    raise Reason.INTERNAL.error(f"{name}: the ranks disagree: {metas[name]} and, at {rank}, {meta}")
                parts.setdefault(name, {})[rank] = Slice(dim, start, length)
        return {name: Spread(metas[name], parts[name]) for name in sorted(metas)}
