"""A weight update call by call, as a trainer makes it, and checks of its result."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import open_channel
from rlctl.transport.status import from_grpc
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub


class Held:
    """Counts executions of a verb at rank 0 of stage a, and blocks each until released."""

    def __init__(self, fleet: InProcessFleet, verb: str) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.times = 0

        async def hold(engine: FakeEngine, name: str, call: Call) -> None:
            if name == verb and engine.config.tp_size == 1:
                self.times += 1
                self.begun.set()
                await self.may_end.wait()

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = hold


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def refusal(call: object) -> RlctlError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_grpc(caught.value)


async def begin(fleet: InProcessFleet, version: str = "step-1", **fields: object) -> u.BeginWeightUpdateResponse:
    trainer = {"trainer": u.Trainer(name="trainer", boot_id="boot")}
    request = u.BeginWeightUpdateRequest(version=version, **{"model": "actor"} | trainer | fields)
    return await fleet.stub.BeginWeightUpdate(request)


async def join(fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse, **changes: object) -> Operation:
    group = plan.groups[0]
    request = v.InitWeightsUpdateGroupRequest(
        **{
            "header": RequestHeader(fence=common.Fence(update_id=plan.update_id)),
            "group_name": group.group_name,
            "world_size": group.world_size,
            "master_address": "127.0.0.1",
            "master_port": 1,
            "backend": "gloo",
        }
        | changes,
    )
    return await fleet.stub.InitWeightsUpdateGroup(request)


async def write(fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse, *names: str) -> Operation:
    bucket = v.TensorBucket(names=names, dtypes=["torch.float32"] * len(names), shapes=[v.Shape()] * len(names))
    request = v.UpdateWeightsFromDistributedRequest(
        header=RequestHeader(fence=common.Fence(update_id=plan.update_id)),
        group_name=plan.groups[0].group_name,
        buckets=[bucket],
    )
    return await fleet.stub.UpdateWeightsFromDistributed(request)


async def commit(
    fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse, expected: str = "", **fields: object
) -> Operation:
    request = u.CommitWeightUpdateRequest(
        update_id=plan.update_id, fencing_token=plan.fencing_token, expected_digest=expected, **fields
    )
    return await fleet.stub.CommitWeightUpdate(request)


async def retry(
    fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse, failed_attempt: int = 0
) -> u.BeginWeightUpdateResponse:
    request = u.RetryWeightUpdateRequest(
        update_id=plan.update_id, fencing_token=plan.fencing_token, failed_attempt=failed_attempt or plan.attempt
    )
    return await fleet.stub.RetryWeightUpdate(request)


async def abort(fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse, token: int | None = None) -> Operation:
    token = plan.fencing_token if token is None else token
    return await fleet.stub.AbortWeightUpdate(
        u.AbortWeightUpdateRequest(update_id=plan.update_id, fencing_token=token, reason="test")
    )


def version_of(fleet: InProcessFleet) -> tuple[str, int]:
    model = fleet.server.coordinator.roster.models["actor"]
    return model.record.latest.label, model.record.latest.sequence


def weights(fleet: InProcessFleet) -> list[str]:
    """Return the weights of every rank's engine."""
    engines = [stage._engine for stage in fleet.stages.values()]
    engines += [worker._follower._engine for worker in fleet.workers.values()]
    return [engine.weights for engine in engines]


def fault(fleet: InProcessFleet, rank: int, tp_size: int, method: str, error: RlctlError) -> None:
    async def fail(engine: FakeEngine, name: str, call: Call) -> None:
        if name == method and engine.config.tp_size == tp_size:
            raise error

    fake_engine.FAULTS[fleet.specs[0].model_path, rank] = fail


@asynccontextmanager
async def unreachable(fleet: InProcessFleet, slot: str) -> AsyncIterator[None]:
    """Break the coordinator's link to a stage, and prevent a new link."""
    coordinator = fleet.server.coordinator
    dialer = coordinator._dialer
    dial, address = dialer.dial, coordinator.roster.slots[slot].record.registration.address

    async def refuse(wanted: str) -> Any:
        if wanted == address:
            raise Reason.UNREACHABLE.error("the network is down")
        return await dial(wanted)

    dialer.dial = refuse  # type: ignore[method-assign]
    try:
        await coordinator.roster.slots[slot].commander.close()
        await eventually(lambda: fleet.stage(slot).state == common.STAGE_STATE_UNREACHABLE)
        yield
    finally:
        dialer.dial = dial  # type: ignore[method-assign]


async def update(fleet: InProcessFleet, text: str, **fields: object) -> Operation:
    """Run a whole update and publish it."""
    plan = await begin(fleet, f"label of {text}", **fields)
    if not plan.groups[0].formed:
        await join(fleet, plan)
    await write(fleet, plan, text)
    operation = await commit(fleet, plan, digest(text))
    assert operation.state == OPERATION_STATE_OK, operation.error
    return operation


async def from_disk(fleet: InProcessFleet, path: str, label: str = "") -> Operation:
    """Run a whole update from a checkpoint and publish it."""
    request = v.UpdateWeightsFromDiskRequest(model_path=path, weight_version=label)
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    assert operation.state == OPERATION_STATE_OK, operation.error
    return operation


async def restart(fleet: InProcessFleet, slot: str) -> None:
    """Stop a stage and start it again from its launch checkpoint."""
    await fleet.stages.pop(slot).stop()
    for rank in [key for key in fleet.workers if key[0] == slot]:
        await fleet.workers.pop(rank).stop()
    await fleet.start_stage(next(spec for spec in fleet.specs if spec.slot == slot))


async def generate(fleet: InProcessFleet, slot: str, tokens: int = 2, **fields: object) -> rollout.Sample:
    """Generate a few tokens, directly at a stage."""
    async with open_channel(fleet.stages[slot].rollout_address) as channel:
        request = rollout.GenerateRequest(
            text="x", sampling_params=rollout.SamplingParams(max_new_tokens=tokens), **fields
        )
        return (await RolloutServiceStub(channel).Generate(request)).samples[0]
