"""Gathers full tensors at one rank of a stage, for any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.shards.rank_exchange import NOTHING, Exchange, agree_to_go_on
from rlctl.weights.tensor.slices import Block, Shard, Slice, Spread
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes, dtype_name, parse_dtype
from rlctl.weights.tensor.work import Stop

Job = tuple[str, Block]
"""Rows of a full tensor, by its checkpoint name."""


def parts_held(shards: Mapping[str, Shard]) -> dict[str, list[Any]]:
    """Describe a rank's parts for other ranks: [dtype, full shape, dim, start, length] by name."""
    return {
        name: [dtype_name(shard.meta.dtype), shard.meta.shape, shard.slice.dim, shard.slice.start, shard.slice.length]
        for name, shard in shards.items()
    }


@dataclass(frozen=True)
class Transfer:
    """Blocks of full tensors on their way to their owner, at one rank.

    Attributes:
        buffers: the bytes by rank: at the owner of all ranks, elsewhere of this rank only.
    """

    batch: Sequence[Job]
    owner: int
    buffers: Sequence[torch.Tensor]


class Gathering:
    """The distribution of a stage's tensors over its ranks. All ranks create it and call :meth:`full` together.

    Several tensors are gathered in three steps: :meth:`prepare`, :meth:`exchange`, :meth:`blocks`. Only the second
    involves the other ranks. An error of another step must be agreed on before the next exchange.

    Attributes:
        spreads: by checkpoint name, in sorted order; the same at every rank.
    """

    def __init__(self, shards: Mapping[str, Shard], exchange: Exchange) -> None:
        """Exchange the distribution. Raises INTERNAL if the ranks' shard maps contradict each other, GROUP_FAILED."""
        self._shards = shards
        self._exchange = exchange
        self.spreads = self._agree()

    def full(self, name: str, stop: Stop, owner: int = 0) -> torch.Tensor | None:
        """Return the full tensor in the reference's dtype, C order, at ``owner``; None elsewhere.

        Raises the cause of any rank's ``stop`` at every rank. An error after the exchange is set as the cause of this
        rank's ``stop``, for the next agreement; the result is None.
        """
        spread = self.spreads[name]
        here = spread.whole and owner in spread.pieces[0].holders
        transfers: list[Transfer] = []
        if not here:
            rows = spread.meta.shape[0] if spread.meta.shape else 1
            with stop.on_error():
                transfers.append(self.prepare([(name, Block(0, rows))], owner))
        agree_to_go_on(self._exchange, stop)
        for transfer in transfers:
            self.exchange(transfer)
        if self._exchange.rank != owner:
            return None
        with stop.on_error():
            if here:
                return self._shards[name].local.detach().to(spread.meta.dtype).contiguous()
            data = torch.cat([block.reshape(-1) for block in self.blocks(transfers[0])[name]])
            return data.view(spread.meta.dtype).reshape(spread.meta.shape)
        return None

    def prepare(self, batch: Sequence[Job], owner: int) -> Transfer:
        """Copy this rank's parts of blocks, and at the owner allocate memory for the other ranks' parts."""
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
        part = torch.cat(local_parts) if local_parts else NOTHING
        return Transfer(batch, owner, self._exchange.buffers(part, sizes, owner))

    def exchange(self, transfer: Transfer) -> None:
        """Bring the parts of all ranks to the owner. Raises GROUP_FAILED."""
        self._exchange.gather(transfer.buffers, transfer.owner)

    def blocks(self, transfer: Transfer) -> dict[str, list[torch.Tensor]]:
        """Return the bytes of the blocks by tensor, on the host, at the owner."""
        parts = [buffer.cpu() for buffer in transfer.buffers]
        gathered: dict[str, list[torch.Tensor]] = {}
        ends = [0] * self._exchange.size
        for name, block in transfer.batch:
            spread = self.spreads[name]
            pieces = []
            for piece in spread.pieces:
                holder, size = piece.holders[0], spread.nbytes(piece, block)
                if size:
                    part = parts[holder][ends[holder] : ends[holder] + size]
                    # A piece cut along an inner dimension has a run of bytes in every outer index of the full tensor.
                    pieces.append(part.reshape(spread.runs(block), -1))
                    ends[holder] += size
            gathered.setdefault(name, []).append(torch.cat(pieces, dim=1) if pieces else NOTHING)
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
