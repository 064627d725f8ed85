"""Failures that users of other systems had: locks, repeats, deadlines, partial effects, overhead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from updating import abort, begin, commit, digest, fault, generate, join, refusal, update, version_of, write
from waiting import eventually

from rlctl.command_stream.commander import Commander
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason
from rlctl.contract.verbs import VERBS
from rlctl.engine import Call
from rlctl.ports import new_uuid7
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import open_channel
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_UNKNOWN,
)
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub


def header(*slots: str, timeout_s: float = 0.0, request_id: str = "") -> RequestHeader:
    timeout = duration(timeout_s) if timeout_s else None
    return RequestHeader(target=Target(slots=slots), timeout=timeout, request_id=request_id)


@asynccontextmanager
async def held_up(fleet: InProcessFleet, method: str, tp_size: int = 1) -> AsyncIterator[list[str]]:
    """A verb of one engine waits until the block is left; yields what it was called with."""
    free, calls = asyncio.Event(), list[str]()

    async def wait(engine: FakeEngine, name: str, call: Call) -> None:
        if name == method and engine.config.tp_size == tp_size:
            calls.append(call.command_id)
            await free.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
    try:
        yield calls
    finally:
        free.set()
        fake_engine.FAULTS.clear()


@asynccontextmanager
async def streams(fleet: InProcessFleet, slot: str, count: int) -> AsyncIterator[list[asyncio.Task[None]]]:
    """So many requests that go on generating until the block is left."""

    async def run(stub: RolloutServiceStub, running: asyncio.Event) -> None:
        params = rollout.SamplingParams(max_new_tokens=1_000_000)
        async for _ in stub.GenerateStream(rollout.GenerateRequest(text="x", sampling_params=params)):
            running.set()

    async with open_channel(fleet.stages[slot].rollout_address) as channel:
        events = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(run(RolloutServiceStub(channel), event)) for event in events]
        await asyncio.gather(*(event.wait() for event in events))
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_incident_03_the_death_of_who_holds_the_model_lets_the_next_one_in(fleet: InProcessFleet) -> None:
    dead = await begin(fleet, lease_ttl=duration(2))
    busy = await refusal(begin(fleet, "step-2"))
    assert (busy.reason, busy.metadata["holder"]) == (Reason.UPDATE_IN_PROGRESS, dead.update_id)
    run = fleet.server.coordinator.operations.get(dead.update_id)
    async with asyncio.timeout(15):
        await run.ended.wait()
    assert run.operation.error.reason == "LEASE_EXPIRED"
    await update(fleet, "w1")
    assert all(fleet.stage(slot).routable for slot in "ab")


async def test_incident_08_an_update_that_is_posted_again_is_applied_once(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), header=header(request_id=new_uuid7()))
    async with held_up(fleet, "update_weights_from_disk") as calls:
        first = fleet.stub.UpdateWeightsFromDisk(request)
        await eventually(lambda: bool(calls))
        first.cancel()  # its caller has waited long enough, and asks again
        again = asyncio.ensure_future(fleet.stub.UpdateWeightsFromDisk(request))
        other = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("three"))
        error = await refusal(fleet.stub.UpdateWeightsFromDisk(other))
        assert error.reason is Reason.UPDATE_IN_PROGRESS
        assert not again.done()
    operation = await again
    assert (operation.state, operation.replayed) == (OPERATION_STATE_OK, True)
    assert len(calls) == 1
    assert version_of(fleet)[1] == 2
    assert (await fleet.stub.UpdateWeightsFromDisk(request)).operation_id == operation.operation_id
    assert len(calls) == 1


async def test_incident_09_admin_calls_do_not_queue_behind_generation(make_fleet: Callable[..., Any]) -> None:
    async with make_fleet(a=1, options={"pace": "0.5"}) as fleet, streams(fleet, "a", 300) as running:
        assert (await fleet.stub.GetLoads(v.GetLoadsRequest())).stage_results[0].rank_results[0].loads.running == 300
        paused = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE))
        assert paused.state == OPERATION_STATE_OK
        assert not any(task.done() for task in running), "none had to end for it"


async def test_incident_10_an_admin_call_that_is_stuck_ends_by_its_deadline_and_holds_up_no_other_stage(
    fleet: InProcessFleet,
) -> None:
    async with held_up(fleet, "flush_cache"):
        stuck = asyncio.ensure_future(fleet.stub.FlushCache(v.FlushCacheRequest(header=header("a", timeout_s=1))))
        other = await fleet.stub.FlushCache(v.FlushCacheRequest(header=header("b")))
        assert other.state == OPERATION_STATE_OK
        assert (await fleet.stub.GetModelInfo(v.GetModelInfoRequest())).state == OPERATION_STATE_OK
        assert not stuck.done()
        operation = await stuck
        assert operation.state == OPERATION_STATE_UNKNOWN
        assert fleet.stage("a").HasField("quarantine"), "what is not known is not served"
    assert all(0 < verb.deadline_s <= 600 for verb in VERBS.values()), "a call without a timeout has the verb's own"


async def test_incident_11_a_flush_after_a_retract_succeeds_and_the_requests_go_on(fleet: InProcessFleet) -> None:
    running = asyncio.ensure_future(generate(fleet, "a", tokens=40))
    await eventually(lambda: bool(fleet.stages["a"]._engine._running))
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    assert (await fleet.stub.FlushCache(v.FlushCacheRequest())).state == OPERATION_STATE_OK
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert list((await running).output_ids) == list(range(40))


async def test_incident_12_a_pause_that_one_engine_refuses_leaves_none_paused(fleet: InProcessFleet) -> None:
    fault(fleet, 1, 2, "pause_generation", Reason.ENGINE_FAILED.error("no"))
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    assert operation.state == OPERATION_STATE_FAILED
    assert "b: rank 1: no" in operation.error.message, "the cause comes first, not what followed from it"
    fake_engine.FAULTS.clear()
    assert all(fleet.stage(slot).routable for slot in "ab")
    assert (await generate(fleet, "a")).output_ids


async def test_incident_12_what_was_paused_before_stays_paused(fleet: InProcessFleet) -> None:
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header("a"), mode=common.PAUSE_MODE_RETRACT))
    fault(fleet, 1, 2, "pause_generation", Reason.ENGINE_FAILED.error("no"))
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    assert fleet.stage("a").state == common.STAGE_STATE_PAUSED
    assert fleet.stage("b").routable


async def test_incident_18_health_is_not_measured_on_the_generation_path(make_fleet: Callable[..., Any]) -> None:
    async with make_fleet(a=1, options={"pace": "0.5"}) as fleet, streams(fleet, "a", 200):
        served = fleet.stages["a"]._engine.generate
        asked: list[object] = []

        def note(request: rollout.GenerateRequest) -> object:
            asked.append(request)
            return served(request)

        fleet.stages["a"]._engine.generate = note
        async with open_channel(fleet.stages["a"].address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for _ in range(5):
                answer = await health.Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert fleet.stage("a").routable
        assert not asked


async def test_incident_19_a_typo_disables_nobody(fleet: InProcessFleet) -> None:
    await refusal(fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=99)))  # type: ignore[arg-type]
    await refusal(fleet.stub.UpdateWeightsFromDisk(v.UpdateWeightsFromDiskRequest(model_path="")))
    operation = await fleet.stub.UpdateWeightsFromDisk(v.UpdateWeightsFromDiskRequest(model_path="/no/such/place"))
    assert operation.state == OPERATION_STATE_FAILED
    assert {result.outcome for result in operation.stage_results} == {common.OUTCOME_REJECTED}
    for slot in "ab":
        assert fleet.stage(slot).routable
        assert fleet.stage(slot).enabled
        assert not fleet.stage(slot).HasField("quarantine")


async def test_incident_20_the_late_result_of_one_operation_is_not_taken_for_the_next_ones(
    fleet: InProcessFleet,
) -> None:
    async with held_up(fleet, "flush_cache") as calls:
        request = v.FlushCacheRequest(header=header("a", timeout_s=2.0))
        late = await fleet.stub.FlushCache(request)
        assert late.state == OPERATION_STATE_UNKNOWN
        following = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header("a"))))
        await asyncio.sleep(0)
    operation = await following
    assert len(calls) == 1
    assert operation.verb == "PauseGeneration"
    assert operation.state == OPERATION_STATE_OK
    assert not operation.stage_results[0].rank_results[0].HasField("flush")
    assert fleet.stage("a").state == common.STAGE_STATE_PAUSED
    recorded = fleet.server.coordinator.operations.get(late.operation_id).operation
    assert recorded.state == OPERATION_STATE_UNKNOWN, "what its caller was told stays so"


async def test_incident_21_a_caller_that_leaves_ends_its_request_at_the_engine(fleet: InProcessFleet) -> None:
    engine = fleet.stages["a"]._engine
    async with streams(fleet, "a", 5):
        await eventually(lambda: len(engine._running) == 5)
    await eventually(lambda: not engine._running)
    async with streams(fleet, "a", 5) as running:
        ended = await fleet.stub.AbortRequests(v.AbortRequestsRequest(abort_all=True, header=header("a")))
        assert ended.stage_results[0].rank_results[0].abort.aborted == 5
        await asyncio.gather(*running)
        assert not engine._running


@pytest.mark.parametrize("buckets", [1, 400])
async def test_incidents_23_and_24_an_update_costs_a_fixed_number_of_commands_whatever_its_size(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch, buckets: int
) -> None:
    sent: dict[str, set[str]] = {}
    issue = Commander.issue

    def count(self: Commander, command_id: str, *rest: Any, **more: Any) -> Any:
        sent.setdefault(command_id.split("/")[1], set()).add(command_id)  # relayed to followers under the same id
        return issue(self, command_id, *rest, **more)

    monkeypatch.setattr(Commander, "issue", count)
    plan = await begin(fleet)
    await join(fleet, plan)
    names = [f"t{n}" for n in range(buckets)]
    request = v.UpdateWeightsFromDistributedRequest(
        header=RequestHeader(fence=common.Fence(update_id=plan.update_id)),
        group_name=plan.groups[0].group_name,
        buckets=[v.TensorBucket(names=[name], dtypes=["torch.float32"], shapes=[v.Shape()]) for name in names],
    )
    await fleet.stub.UpdateWeightsFromDistributed(request)
    assert (await commit(fleet, plan, digest(",".join(names)))).state == OPERATION_STATE_OK
    assert set(sent) == {"a", "b"}
    assert all(len(commands) <= 9 for commands in sent.values()), sent


async def test_incident_20_an_update_that_was_aborted_does_not_take_the_answers_of_the_one_before(
    fleet: InProcessFleet,
) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    stuck = asyncio.ensure_future(write(fleet, plan, "stuck"))
    await eventually(lambda: all(stage._engine._written for stage in fleet.stages.values()))
    await abort(fleet, plan)
    assert (await stuck).state != OPERATION_STATE_OK
    await update(fleet, "w1")
    assert version_of(fleet)[0] == "label of w1"
