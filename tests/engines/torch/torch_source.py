"""A trainer in small: sends the weights of a checkpoint to a stage over a gloo group, or tells it to read them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch_stage import Stage

from rlctl.v1.verbs_pb2 import (
    CommitUpdateRequest,
    DestroyWeightsUpdateGroupRequest,
    InitWeightsUpdateGroupRequest,
    PrepareUpdateRequest,
    UpdateWeightsFromDiskRequest,
    UpdateWeightsFromDistributedRequest,
)
from rlctl.weights.group.process_group import GroupStore, WeightGroup, join
from rlctl.weights.receiver import send
from rlctl.weights.tensor.buckets import Bucket, plan, to_proto
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import WeightSource, as_source, atomic_lists, in_lists

Weights = dict[str, torch.Tensor] | torch.nn.Module | WeightSource

_updates = (f"update-{number}" for number in itertools.count())
_groups = (f"actor-{number}" for number in itertools.count())


def tensors_of(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    return load_file(Path(path) / "model.safetensors")


def digest_of(path: str) -> str:
    """The model digest of a checkpoint."""
    digest = ModelDigest()
    for name, tensor in tensors_of(path).items():
        digest.add(name, tensor)
    return digest.digest()


class Source:
    """Group rank 0 of a weight group with a stage."""

    def __init__(self, stage: Stage, timeout: float = 20.0) -> None:
        self.stage = stage
        self.name = next(_groups)
        self.store = GroupStore()
        self.ranks = stage.config.tp_size
        self.group: WeightGroup | None = None
        self._timeout = timeout

    def init_request(self, **fields: Any) -> InitWeightsUpdateGroupRequest:
        """What the stage is asked to join."""
        host, port = self.store.local_address
        settings = {
            "master_address": host,
            "master_port": port,
            "world_size": 1 + self.ranks,
            "rank_offset": 1,
            "group_name": self.name,
            "backend": "gloo",
        }
        return InitWeightsUpdateGroupRequest(**{**settings, **fields})

    async def __aenter__(self) -> Source:
        joining = asyncio.to_thread(
            join, self.store, name=self.name, rank=0, world_size=1 + self.ranks, timeout_s=self._timeout
        )
        self.group, reports = await asyncio.gather(joining, self.stage(self.init_request(), within=self._timeout))
        assert [report.group_rank for report in reports] == [1 + rank for rank in range(self.ranks)]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.group is not None
        self.group.close()
        await self.stage.ranks(DestroyWeightsUpdateGroupRequest(group_name=self.name))
        self.store.close()

    def buckets(self, weights: Weights) -> list[Bucket]:
        """Small buckets, and tensors that travel by themselves."""
        source = _as_source(weights)
        return plan(in_lists(source.metas(), atomic_lists(source)), bucket_bytes=64 << 10, large_bytes=40 << 10)

    def request(self, buckets: Sequence[Bucket]) -> UpdateWeightsFromDistributedRequest:
        """What the stage is told to receive."""
        return UpdateWeightsFromDistributedRequest(
            group_name=self.name, buckets=[to_proto(bucket) for bucket in buckets]
        )

    async def send(self, weights: Weights, update: str) -> tuple[list[Any], str]:
        """Send weights inside an update; every rank's report, and the digest of what was sent."""
        digest = ModelDigest()
        buckets = self.buckets(weights)
        assert self.group is not None
        sending = asyncio.to_thread(send, _as_source(weights), buckets, self.group, digest)
        reports, _ = await asyncio.gather(self.stage(self.request(buckets), update=update), sending)
        return reports, digest.digest()


def _as_source(weights: Weights) -> WeightSource:
    return as_source(weights.items() if isinstance(weights, dict) else weights)


async def prepare(stage: Stage, **fields: Any) -> str:
    """Open an update; returns its id."""
    update = next(_updates)
    await stage(PrepareUpdateRequest(**fields), update=update)
    return update


async def load(stage: Stage, path: str, **fields: Any) -> None:
    """A full update from disk."""
    update = await prepare(stage, **fields)
    await stage(UpdateWeightsFromDiskRequest(model_path=path), update=update)
    await stage(CommitUpdateRequest(), update=update)
