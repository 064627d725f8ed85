"""control_null_bucket, control_null_rest: the control plane alone, for a large fleet without real collectives."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlctl.ports import new_uuid7
from rlctl.sdk.blocking import Fleet
from rlctl.v1.common_pb2 import PAUSE_MODE_RETRACT, VERIFICATION_LEVEL_NONE
from rlctl.v1.update_pb2 import (
    BeginWeightUpdateRequest,
    BeginWeightUpdateResponse,
    CommitWeightUpdateRequest,
    Trainer,
)
from rlctl.v1.verbs_pb2 import (
    InitWeightsUpdateGroupRequest,
    UpdateOptions,
    UpdateWeightsFromDistributedRequest,
)
from rlctl.weights.tensor.buckets import Bucket, to_proto
from rlctl.weights.tensor.tensors import TensorMeta
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.null_fleet import NullFleet
from tools.benchmark.rounds import Spread, interleaved

RANKS = 8
SOURCES = 4
TENSORS_PER_BUCKET = 21
"""Number of experts' matrices of Qwen3-30B-A3B (768 × 2048, bfloat16) in a bucket of 64 MiB."""


@dataclass(frozen=True)
class Sample:
    """An update.

    Attributes:
        bucket_s: time per bucket, from the announcement of all buckets to their receipt at every rank, ÷ their number.
        rest_s: remaining time of the update.
    """

    bucket_s: float
    rest_s: float


def _size(setting: Setting) -> tuple[int, int]:
    """Return the numbers of stages and buckets."""
    return (4, 20) if setting.quick else (64, 400)


def samples(setting: Setting) -> Sequence[Sample]:
    """Measure rounds of whole updates."""
    stages, count = _size(setting)
    with NullFleet(setting.directory / "null", stages=stages, ranks=RANKS) as null, null.connect() as fleet:
        setting.say(f"{stages} stages of {RANKS} ranks that do nothing")
        trainer = _Trainer(fleet, count)
        return interleaved(setting.rounds, {"null": trainer.update})["null"]


class _Trainer:
    """Speaks the contract directly: there is no group to send over, so the SDK's publisher is not used."""

    def __init__(self, fleet: Fleet, count: int) -> None:
        self._fleet = fleet
        self._boot_id = new_uuid7()
        self._numbers = itertools.count()
        self._buckets = [to_proto(bucket) for bucket in _buckets(count)]

    def update(self) -> Sample:
        """Run an update. The first bucket goes alone: its time includes the preparation of the targets."""
        started = time.perf_counter()
        plan = self._begin()
        self._receive(plan, 0, 1)
        announced = time.perf_counter()
        self._receive(plan, 1, len(self._buckets))
        received_s = time.perf_counter() - announced
        commit = CommitWeightUpdateRequest(update_id=plan.update_id, fencing_token=plan.fencing_token)
        self._call("CommitWeightUpdate", commit)
        bucket_s = received_s / (len(self._buckets) - 1)
        return Sample(bucket_s, time.perf_counter() - started - len(self._buckets) * bucket_s)

    def _begin(self) -> BeginWeightUpdateResponse:
        begin = BeginWeightUpdateRequest(
            model="actor",
            version=f"null-{next(self._numbers)}",
            trainer=Trainer(name="bench", boot_id=self._boot_id),
            num_sources=SOURCES,
            options=UpdateOptions(pause=PAUSE_MODE_RETRACT, verify=VERIFICATION_LEVEL_NONE),
        )
        plan: BeginWeightUpdateResponse = self._call("BeginWeightUpdate", begin)
        for group in plan.groups:
            if group.formed:
                continue
            join = InitWeightsUpdateGroupRequest(
                master_address="127.0.0.1",
                master_port=1,
                world_size=group.world_size,
                group_name=group.group_name,
                backend=group.backend,
            )
            join.header.fence.update_id = plan.update_id
            self._fleet.call(join)
        return plan

    def _receive(self, plan: BeginWeightUpdateResponse, first: int, end: int) -> None:
        request = UpdateWeightsFromDistributedRequest(buckets=self._buckets[first:end])
        for number, bucket in enumerate(request.buckets, start=first):  # the sources take turns
            bucket.group_name = plan.groups[number % SOURCES].group_name
        request.header.fence.update_id = plan.update_id
        self._fleet.call(request)

    def _call(self, method: str, request: BeginWeightUpdateRequest | CommitWeightUpdateRequest) -> Any:
        return self._fleet.loop.call(self._fleet.aio.connection.call(method, request, 60.0))


def _buckets(count: int) -> list[Bucket]:
    experts = (
        TensorMeta(f"model.layers.{n // 128}.mlp.experts.{n % 128}.gate_proj.weight", torch.bfloat16, (768, 2048))
        for n in itertools.count()
    )
    return [Bucket(sequence, list(itertools.islice(experts, TENSORS_PER_BUCKET)), True) for sequence in range(count)]


def _bucket(setting: Setting) -> Reading:
    stages, count = _size(setting)
    times = [sample.bucket_s * 1e3 for sample in setting.once(samples)]
    return Reading.of(Spread.of(times), stages=stages, ranks=stages * RANKS, buckets=count)


def _rest(setting: Setting) -> Reading:
    return Reading.of(Spread.of([sample.rest_s * 1e3 for sample in setting.once(samples)]))


BUCKET = Figure(
    "control_null_bucket",
    "update without collectives, 64 stages of 8 ranks, 4 sources, 400 buckets of 21 tensors: mean time for a bucket, "
    "median of the rounds",
    "ms",
    _bucket,
    at_most=2,
)
REST = Figure("control_null_rest", "everything else of such an update: begin to resumed", "ms", _rest, at_most=300)
