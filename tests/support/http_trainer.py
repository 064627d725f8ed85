"""A trainer with HTTP: its own store and group, and the model that it sends."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Awaitable, Mapping
from typing import Any

import torch

from rlctl.weights.group.process_group import GroupStore, WeightGroup, join
from rlctl.weights.tensor.digest import combine, tensor_digest

Tensors = Mapping[str, torch.Tensor]


def weights_of(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Return a model's tensors under checkpoint names, changed by a seed."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return {name: tensor.detach().contiguous() for name, tensor in other.named_parameters()}


def digest_of(tensors: Tensors) -> str:
    """Return the model digest that engines must have afterwards."""
    return combine({name: tensor_digest(name, tensor) for name, tensor in tensors.items()})


def chunks_of(tensors: Tensors, count: int) -> list[dict[str, torch.Tensor]]:
    """Split the tensors into ``count`` parts."""
    items = list(tensors.items())
    size = -(-len(items) // count)
    return [dict(items[start : start + size]) for start in range(0, len(items), size)]


def announced(tensors: Tensors, dtypes: str = "dtypes") -> dict[str, Any]:
    """Return names, dtypes and shapes, in the form of requests."""
    return {
        "names": list(tensors),
        dtypes: [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


class Source:
    """Rank 0 of a group formed by the trainer. ``async with Source(4) as source``.

    Attributes:
        name: the group's.
        world_size: number of members, with the source.
        port: TCP port of its store, on 127.0.0.1.
    """

    def __init__(self, world_size: int, name: str = "") -> None:
        self.name = name or f"group-{uuid.uuid4().hex[:8]}"
        self.world_size = world_size
        self._store = GroupStore()
        self.port = self._store.local_address[1]
        self._group: WeightGroup | None = None

    async def __aenter__(self) -> Source:
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._group is not None:
            self._group.close()
        self._store.close()

    @property
    def where(self) -> dict[str, Any]:
        """Return the store's place and the group's size, for the engines."""
        return {"master_address": "127.0.0.1", "master_port": self.port, "world_size": self.world_size}

    async def meet(self, *calls: Awaitable[Any]) -> list[Any]:
        """Form the group while the calls bring the engines to the group; return the answers."""
        forming = asyncio.to_thread(
            join, self._store, name=self.name, rank=0, world_size=self.world_size, timeout_s=60.0
        )
        self._group, *answers = await asyncio.gather(forming, *calls)
        return answers

    async def send(self, tensors: Tensors, *calls: Awaitable[Any]) -> list[Any]:
        """Broadcast tensors one by one while the calls announce the tensors; return the answers."""
        group = self._group
        assert group is not None

        def broadcast() -> None:
            for tensor in tensors.values():
                group.broadcast(tensor)

        _, *answers = await asyncio.gather(asyncio.to_thread(broadcast), *calls)
        return answers

    async def send_packed(self, tensors: Tensors, most: int, *calls: Awaitable[Any]) -> list[Any]:
        """Broadcast tensors packed like vLLM: a broadcast ends with the tensor that exceeds ``most`` bytes."""
        packs: dict[str, torch.Tensor] = {}
        pack: list[torch.Tensor] = []
        for name, tensor in tensors.items():
            pack.append(tensor.reshape(-1).view(torch.uint8))
            if sum(each.numel() for each in pack) > most or name == list(tensors)[-1]:
                packs[name], pack = torch.cat(pack), []
        assert len(packs) > 1
        return await self.send(packs, *calls)
