"""min_healthy: voluntary disruptions leave enough stages of a model routable, losses are shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fleet_steps import restart_coordinator
from updating import begin, commit, digest, join, refusal, unreachable, write
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.fleet import disruptions
from rlctl.sdk import aio
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport import grpc
from rlctl.transport.status import from_grpc
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.fleet_pb2 import MinHealthy
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

RETRACT = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)


@pytest.fixture
async def four(make_fleet: Callable[..., Any]) -> AsyncIterator[InProcessFleet]:
    async with make_fleet(a=1, b=1, c=1, d=1, heal=False) as fleet:
        yield fleet


async def limit(fleet: InProcessFleet, text: str) -> None:
    client = await aio.connect(fleet.server.address)
    await client.set_min_healthy("actor", text)
    await client.close()


async def disable(fleet: InProcessFleet, *slots: str, **fields: Any) -> RlctlError | None:
    """Disable stages. Returns the refusal, if any."""
    try:
        await fleet.stub.SetStageEnabled(rpc.SetStageEnabledRequest(slots=slots, **fields))
    except grpc.aio.AioRpcError as error:
        return from_grpc(error)
    return None


def routable(fleet: InProcessFleet) -> int:
    return sum(stage.routable for stage in fleet.server.coordinator.roster.fleet().stages)


@pytest.mark.parametrize("text", ["3", "51%", "75%"])
async def test_a_disable_leaves_enough_stages_routable(four: InProcessFleet, text: str) -> None:
    await limit(four, text)
    (model,) = four.server.coordinator.roster.fleet().models
    assert model.min_healthy_stages == 3
    refused = await disable(four, "a", "b")
    assert refused is not None
    assert refused.reason is Reason.MIN_HEALTHY
    assert refused.metadata == {"model": "actor", "min_healthy": text, "limit": "3", "healthy": "4"}
    assert f"would have 2 without a, b; min_healthy is {text}" in refused.message
    assert routable(four) == 4
    assert await disable(four, "a") is None
    assert await disable(four, "a") is None, "a disabled stage is no further disruption"
    refused = await disable(four, "b", header=common.RequestHeader(validate_only=True))
    assert refused is not None
    assert refused.reason is Reason.MIN_HEALTHY
    refused = await refusal(four.stub.DeregisterStage(rpc.DeregisterStageRequest(slot="b")))
    assert refused is not None
    assert refused.reason is Reason.MIN_HEALTHY
    assert routable(four) == 3
    assert await disable(four, "b", force=True) is None
    assert routable(four) == 2
    await limit(four, "0")
    assert await disable(four, "c") is None


async def test_disables_at_the_same_time_do_not_count_each_other(four: InProcessFleet) -> None:
    await limit(four, "2")
    answers = await asyncio.gather(*(disable(four, slot) for slot in "abcd"))
    assert [answer is None for answer in answers].count(True) == 2
    assert routable(four) == 2


async def test_the_limit_survives_a_coordinator(four: InProcessFleet) -> None:
    await limit(four, "4")
    await restart_coordinator(four)
    await eventually(lambda: routable(four) == 4)
    refused = await disable(four, "a")
    assert refused is not None
    assert refused.reason is Reason.MIN_HEALTHY


async def test_a_loss_is_not_refused_and_is_shown(four: InProcessFleet) -> None:
    await limit(four, "4")
    roster = four.server.coordinator.roster
    async with unreachable(four, "a"):
        assert len(disruptions.healthy(roster, roster.models["actor"])) == 3
        assert roster.fleet().models[0].min_healthy_stages == 4
        assert await disable(four, "a") is None, "a lost stage serves nothing"


@pytest.mark.parametrize("percent", [101, 4_000_000_000])
async def test_an_impossible_limit_is_refused(four: InProcessFleet, percent: int) -> None:
    request = rpc.SetMinHealthyRequest(model="actor", min_healthy=MinHealthy(percent=percent))
    refused = await refusal(four.stub.SetMinHealthy(request))
    assert refused is not None
    assert (refused.reason, refused.field) == (Reason.FIELD_INVALID, "min_healthy.percent")
    refused = await refusal(four.stub.SetMinHealthy(rpc.SetMinHealthyRequest(model="other")))
    assert refused is not None
    assert refused.reason is Reason.MODEL_NOT_FOUND


async def roll(fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse) -> tuple[list[int], int]:
    """Lead a rolling update in place. Returns the sizes of the batches, and the fewest routable stages at a write."""
    sizes, fewest = [], len(fleet.stages)
    while True:
        sizes.append(len(plan.batch.slots))
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        fewest = min(fewest, routable(fleet))
        refused = await disable(fleet, *(set("abcd") - set(plan.batch.slots)))
        assert refused is not None
        assert refused.reason is Reason.MIN_HEALTHY
        if plan.batch.last:
            assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK
            return sizes, fewest
        request = u.CommitBatchRequest(
            update_id=plan.update_id,
            fencing_token=plan.fencing_token,
            batch=plan.batch.number,
            expected_digest=digest("w1"),
        )
        plan = (await fleet.stub.CommitBatch(request)).next


async def test_a_rolling_update_in_place_makes_batches_that_keep_the_limit(four: InProcessFleet) -> None:
    await limit(four, "3")
    three = u.RolloutStrategy(max_unavailable=3)
    sizes, fewest = await roll(four, await begin(four, version="one", rollout=three, options=RETRACT))
    assert sizes == [1, 1, 1, 1]
    assert fewest == 3
    await limit(four, "50%")
    sizes, fewest = await roll(four, await begin(four, version="two", rollout=three, options=RETRACT))
    assert sizes == [2, 2]
    assert fewest == 2


async def test_a_rolling_update_that_cannot_keep_the_limit_is_refused_at_its_begin(four: InProcessFleet) -> None:
    await limit(four, "100%")
    for apply in (v.APPLY_MODE_IN_PLACE, v.APPLY_MODE_STAGED):
        refused = await refusal(
            begin(four, version="new", rollout=u.RolloutStrategy(max_unavailable=1), options=RETRACT, apply=apply)
        )
        assert refused is not None
        assert refused.reason is Reason.MIN_HEALTHY
    # Pausing is not losing: an update of all stages at once goes on.
    plan = await begin(four, version="new", options=RETRACT)
    await join(four, plan)
    await write(four, plan, "w1")
    assert (await commit(four, plan, digest("w1"))).state == OPERATION_STATE_OK


async def test_a_staged_rolling_update_keeps_the_limit(four: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    await limit(four, "3")
    fewest = 4

    async def watch() -> None:
        nonlocal fewest
        while True:
            fewest = min(fewest, routable(four))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    client = await aio.connect(four.server.address)
    operation = await client.update_weights_from_disk(
        checkpoint("two"), version="two", options=RETRACT, apply=v.APPLY_MODE_STAGED, max_unavailable=4
    )
    await client.close()
    watching.cancel()
    assert operation.state == OPERATION_STATE_OK
    assert fewest == 3


async def test_a_rolling_update_that_falls_below_the_limit_goes_on_one_by_one(four: InProcessFleet) -> None:
    await limit(four, "2")
    plan = await begin(four, version="new", rollout=u.RolloutStrategy(max_unavailable=2), options=RETRACT)
    assert list(plan.batch.slots) == ["a", "b"]
    await limit(four, "4")  # as after a loss: an end of the update would make the other stages STALE
    sizes, _ = await roll(four, plan)
    assert sizes == [2, 1, 1]
