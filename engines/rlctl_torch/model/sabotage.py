"""Negative controls: deliberate faults in weight updates, which verification must find.

Off unless the environment variable RLCTL_TORCH_SABOTAGE is set at the start of a rank:

- ``stale``: updates are acknowledged, nothing is written;
- ``drop-tensor:NAME`` or ``drop-tensor:NAME@RANK``: the tensor is received and counted as written, but not placed,
  at every rank or at rank RANK only;
- ``wrong-rank``: the highest rank places the slices of rank 0;
- ``swap:NAME,OTHER``: the two tensors (an expert and its neighbour, say) are placed in exchanged places;
- ``stale-decode``: decode steps compute with a copy of one weight, made at the start; prefill uses the weight itself.

Only this module knows the variable, and gives the update path a wrong shard map or hooks the forward pass. Loading at
the start, digests and everything else use the true shard map.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from rlctl.contract.errors import Reason
from rlctl.weights.shards.shard_map import Shard, ShardMap, Slice

VARIABLE = "RLCTL_TORCH_SABOTAGE"
_DROP = "drop-tensor:"
_SWAP = "swap:"
_STALE_DECODE = "stale-decode"


class _Dropping(ShardMap):
    """Shard map that does not place some tensors."""

    def __init__(self, shards: ShardMap, dropped: Collection[str]) -> None:
        super().__init__(shards.shards, shards.together)
        self._dropped = dropped

    def place(self, name: str, full: torch.Tensor) -> None:
        if name not in self._dropped:
            super().place(name, full)

    def place_local(self, name: str, part: torch.Tensor) -> None:
        if name not in self._dropped:
            super().place_local(name, part)

    def part_in_place(self, name: str) -> torch.Tensor:
        """Return the memory to read into. The memory of a dropped tensor is discarded."""
        memory = super().part_in_place(name)
        return torch.empty_like(memory) if name in self._dropped else memory

    def full_in_place(self, name: str) -> torch.Tensor | None:
        """Return the memory to receive into, or None for a dropped tensor."""
        return None if name in self._dropped else super().full_in_place(name)


def for_updates(shards: ShardMap, rank: int, size: int) -> ShardMap:
    """Return the shard map of updates: the true map, unless the environment names a negative control.

    Raises FIELD_INVALID for an unknown control, and for a tensor that the model does not have.
    """
    control = os.environ.get(VARIABLE, "")
    if control in ("", _STALE_DECODE):
        return shards
    if control == "stale":
        return _Dropping(shards, shards.shards.keys())
    dropped, _, only_rank = control.removeprefix(_DROP).partition("@")
    if control.startswith(_DROP) and dropped in shards.shards and only_rank in ("", *map(str, range(size))):
        return _Dropping(shards, {dropped}) if only_rank in ("", str(rank)) else shards
    if control.startswith(_SWAP) and shards.shards.keys() >= set(names := control.removeprefix(_SWAP).split(",")):
        first, second = (shards.shards[name] for name in names)
        swapped = {
            first.meta.name: replace(first, local=second.local),
            second.meta.name: replace(second, local=first.local),
        }
        return ShardMap({**shards.shards, **swapped}, shards.together)
    if control == "wrong-rank":
        misplaced = {name: _of_rank_0(shard) for name, shard in shards.shards.items()}
        return ShardMap(misplaced, shards.together) if rank == size - 1 else shards
    raise Reason.FIELD_INVALID.error(f"{VARIABLE} is {control!r}, which is no negative control", field=VARIABLE)


def for_decode(module: torch.nn.Module) -> None:
    """Let decode steps compute with a stale weight, if the environment names this control."""
    if os.environ.get(VARIABLE) != _STALE_DECODE:
        return
    weight = next(parameter for name, parameter in module.named_parameters() if name.endswith("down_proj.weight"))
    spare = weight.data.clone()

    def exchange(_module: torch.nn.Module, _args: object, kwargs: Mapping[str, torch.Tensor], *_: object) -> None:
        nonlocal spare
        tokens, outputs = kwargs["input_ids"].shape[1], len(kwargs["logits_to_keep"])
        if tokens == outputs:  # every token is the next token of its sequence
            weight.data, spare = spare, weight.data

    module.register_forward_pre_hook(exchange, with_kwargs=True)
    module.register_forward_hook(exchange, with_kwargs=True, always_call=True)


def _of_rank_0(shard: Shard) -> Shard:
    return shard if shard.slice.dim is None else replace(shard, slice=Slice(shard.slice.dim, 0, shard.slice.length))
