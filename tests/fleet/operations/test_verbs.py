"""Verbs through real servers: coordinator → stream → stage → relay → ranks, and back."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from waiting import eventually

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.ports import new_uuid7
from rlctl.sdk import aio
from rlctl.testing import fake_engine
from rlctl.testing.chaos_proxy import ChaosProxy
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import open_channel
from rlctl.transport.status import from_grpc
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2, results_pb2
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_NOT_SENT,
    OUTCOME_REJECTED,
    OUTCOME_SKIPPED,
    OUTCOME_UNKNOWN,
    RequestHeader,
    Target,
)
from rlctl.v1.fleet_pb2 import StageRegistration
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_UNKNOWN,
)
from rlctl.v1.stage_pb2_grpc import StageServiceStub


def header(*slots: str, timeout_s: float = 0.0, **more: object) -> RequestHeader:
    timeout = duration(timeout_s) if timeout_s else None
    return RequestHeader(target=Target(slots=slots), timeout=timeout, **more)


async def refusal(call: object) -> object:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_grpc(caught.value)


async def test_every_rank_of_every_stage_answers_for_itself(fleet: InProcessFleet) -> None:
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    assert operation.state == OPERATION_STATE_OK
    assert list(operation.targets) == ["a", "b"]
    found = [[(r.coordinates.rank, r.outcome, r.evidence) for r in s.rank_results] for s in operation.stage_results]
    good = (OUTCOME_APPLIED, common.EVIDENCE_RANK)
    assert found == [[(0, *good)], [(0, *good), (1, *good)]]
    assert {r.step for r in operation.stage_results[1].rank_results} == {
        operation.stage_results[1].rank_results[0].step
    }
    assert [s.state for s in operation.stage_results] == [common.STAGE_STATE_PAUSED] * 2
    assert not fleet.stage("a").routable
    assert fleet.stage("a").not_routable == "PAUSED"
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert fleet.stage("a").routable


async def test_only_the_named_targets_are_addressed(fleet: InProcessFleet) -> None:
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header("b")))
    assert [r.slot for r in operation.stage_results] == ["b"]
    assert fleet.stage("a").state == common.STAGE_STATE_READY


@pytest.mark.parametrize(
    ("target", "reason", "field"),
    [
        (Target(slots=["zz"]), "STAGE_NOT_FOUND", "header.target.slots[0]"),
        (Target(model="zz"), "MODEL_NOT_FOUND", "header.target.model"),
        (Target(stages=["zz"]), "STAGE_NOT_FOUND", "header.target.stages[0]"),
    ],
)
async def test_an_unknown_target_is_refused_and_nothing_is_paused(
    fleet: InProcessFleet, target: Target, reason: str, field: str
) -> None:
    request = v.PauseGenerationRequest(header=RequestHeader(target=target))
    error = await refusal(fleet.stub.PauseGeneration(request))
    assert (error.reason.name, error.field) == (reason, field)
    assert fleet.stage("a").routable


async def test_bad_requests_reach_no_engine(fleet: InProcessFleet) -> None:
    seen = []

    async def record(engine: FakeEngine, method: str, call: Call) -> None:
        seen.append(method)

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = record
    for request, method, field in (
        (v.PauseGenerationRequest(mode=99), "PauseGeneration", "mode"),
        (v.ReleaseMemoryRequest(tags=[0]), "ReleaseMemory", "tags"),
        (v.UpdateWeightsFromDiskRequest(), "UpdateWeightsFromDisk", "model_path"),
        (v.UpdateWeightsFromDistributedRequest(group_name="g"), "UpdateWeightsFromDistributed", "buckets"),
        (v.UpdateWeightsFromTensorRequest(), "UpdateWeightsFromTensor", "segments"),
        (v.DestroyWeightsUpdateGroupRequest(), "DestroyWeightsUpdateGroup", "group_name"),
        (v.PullWeightsRequest(source_dir="a", target_version="v"), "PullWeights", "local_checkpoint_dir"),
        (v.InspectCheckpointRequest(target_modules=["x"]), "InspectCheckpoint", "model_path"),
        (v.InspectCheckpointRequest(model_path="a", target_modules=[""]), "InspectCheckpoint", "target_modules[0]"),
    ):
        error = await refusal(getattr(fleet.stub, method)(request))
        assert error.field == field
    assert seen == []
    assert fleet.stage("a").routable


async def test_an_oversized_message_is_refused_with_its_size(fleet: InProcessFleet) -> None:
    big = v.AbortRequestsRequest(rids=["x" * (17 << 20)])
    error = await refusal(fleet.stub.AbortRequests(big))
    assert error.reason is Reason.MESSAGE_TOO_LARGE
    assert str(big.ByteSize()) in error.message
    assert error.field == "AbortRequestsRequest"
    huge = v.AbortRequestsRequest(rids=["x" * (65 << 20)])
    error = await refusal(fleet.stub.AbortRequests(huge))
    assert error.reason is Reason.MESSAGE_TOO_LARGE
    assert fleet.stage("a").routable


async def test_garbage_is_refused(fleet: InProcessFleet) -> None:
    call = fleet.channel.unary_unary("/rlctl.v1.CoordinatorService/PauseGeneration")
    error = await refusal(call(b"\xff\xff\xff"))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "PauseGenerationRequest")


async def test_a_rank_that_refuses_keeps_its_stage_from_it(fleet: InProcessFleet) -> None:
    async def refuse(engine: FakeEngine, method: str, call: Call) -> None:
        if engine.config.tp_size == 2:
            raise Reason.ENGINE_FAILED.error("no")

    fake_engine.FAULTS[fleet.specs[1].model_path, 1] = refuse
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert operation.state == OPERATION_STATE_FAILED
    assert [s.outcome for s in operation.stage_results] == [OUTCOME_REJECTED, OUTCOME_REJECTED]
    assert "2 of 2 stages did not confirm; b: rank 1: no" in operation.error.message
    assert fleet.stage("b").state == common.STAGE_STATE_READY
    assert fleet.stage("b").routable, "a refusal without effect quarantines nobody"


async def test_a_rank_that_does_not_answer_is_unknown_and_its_stage_quarantined(fleet: InProcessFleet) -> None:
    stuck = asyncio.Event()

    async def hang(engine: FakeEngine, method: str, call: Call) -> None:
        if engine.config.tp_size == 2:
            await stuck.wait()

    fake_engine.FAULTS[fleet.specs[1].model_path, 1] = hang
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header(timeout_s=0.5)))
    stuck.set()
    assert operation.state == OPERATION_STATE_UNKNOWN
    b = operation.stage_results[1]
    assert b.outcome == OUTCOME_UNKNOWN
    assert [r.outcome for r in b.rank_results] == [OUTCOME_REJECTED, OUTCOME_UNKNOWN]
    assert b.rank_results[1].error.reason in ("RANK_SILENT", "DEADLINE_EXCEEDED")
    assert not fleet.stage("b").routable
    assert fleet.stage("b").quarantine.reason
    stages = await fleet.until(lambda stages: not stages[1].report.lease_held)
    assert not stages[1].report.lease_held, "a quarantined stage is told to serve nothing"


async def test_a_stage_whose_process_is_gone_is_not_sent(fleet: InProcessFleet) -> None:
    stage = fleet.stages["b"]
    await stage._admin.stop(0)
    await fleet.until(lambda stages: stages[1].state == common.STAGE_STATE_UNREACHABLE)
    whole = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert whole.state == OPERATION_STATE_OK
    assert [(e.slot, e.state) for e in whole.excluded] == [("b", common.STAGE_STATE_UNREACHABLE)]
    named = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header("b")))
    assert named.state == OPERATION_STATE_FAILED
    assert named.stage_results[0].outcome == OUTCOME_NOT_SENT


async def test_reads_do_not_wait_behind_a_write(fleet: InProcessFleet) -> None:
    release = asyncio.Event()
    begun = asyncio.Event()

    async def hold(engine: FakeEngine, method: str, call: Call) -> None:
        if method == "pause_generation":
            begun.set()
            await release.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = hold
    pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header("a"))))
    await begun.wait()
    loads = await fleet.stub.GetLoads(v.GetLoadsRequest(header=header("a")))
    assert loads.state == OPERATION_STATE_OK
    assert not pausing.done()
    release.set()
    assert (await pausing).state == OPERATION_STATE_OK


async def test_weights_that_nobody_knows_are_not_called_by_the_version_that_they_were_at(fleet: InProcessFleet) -> None:
    async def named() -> list[tuple[str, str]]:
        results = (await fleet.stub.GetModelInfo(v.GetModelInfoRequest())).stage_results
        ranks = [{rank.model_info.weight_version.label for rank in result.rank_results} for result in results]
        assert [len(each) for each in ranks] == [1, 1], "followers name the version, too"
        return [(r.weight_version.label, *labels) for r, labels in zip(results, ranks, strict=True)]

    assert await named() == [("initial", "initial")] * 2
    scramble = v.CheckWeightsRequest(header=header("b"), action=v.CHECK_ACTION_RESET_TENSORS)
    await fleet.stub.CheckWeights(scramble)
    assert await named() == [("initial", "initial"), ("", "")]


async def test_a_conflicting_operation_is_refused_naming_the_holder(fleet: InProcessFleet) -> None:
    release, begun = asyncio.Event(), asyncio.Event()

    async def hold(engine: FakeEngine, method: str, call: Call) -> None:
        begun.set()
        await release.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = hold
    mine = new_uuid7()
    first = v.PauseGenerationRequest(header=header("a", request_id=mine))
    pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(first))
    await begun.wait()
    error = await refusal(fleet.stub.ContinueGeneration(v.ContinueGenerationRequest()))
    assert error.reason is Reason.OPERATION_CONFLICT
    assert error.metadata == {"holder": mine, "slot": "a"}
    release.set()
    await pausing


async def test_a_repeat_returns_the_recorded_result_and_another_body_is_refused(fleet: InProcessFleet) -> None:
    request = v.PauseGenerationRequest(header=RequestHeader(request_id=new_uuid7()), mode=2)
    first = await fleet.stub.PauseGeneration(request)
    steps = [r.step for s in first.stage_results for r in s.rank_results]
    again = await fleet.stub.PauseGeneration(request)
    assert again.replayed
    assert [r.step for s in again.stage_results for r in s.rank_results] == steps
    request.mode = 1
    error = await refusal(fleet.stub.PauseGeneration(request))
    assert (error.reason, error.field) == (Reason.REQUEST_ID_REUSED, "header.request_id")


async def test_the_answer_to_a_read_is_not_taken_for_that_to_a_pause_under_its_id(fleet: InProcessFleet) -> None:
    begun, release = asyncio.Event(), asyncio.Event()

    async def hold(engine: FakeEngine, method: str, call: Call) -> None:
        if method == "get_model_info":
            begun.set()
            await release.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = hold
    mine = header("a", request_id=new_uuid7())
    reading = asyncio.ensure_future(fleet.stub.GetModelInfo(v.GetModelInfoRequest(header=mine)))
    await begun.wait()
    pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=mine)))
    await asyncio.wait([pausing], timeout=0.2)
    release.set()
    (paused,) = (await pausing).stage_results
    assert (paused.outcome, paused.error.reason) == (OUTCOME_REJECTED, "REQUEST_ID_REUSED")
    (read,) = (await reading).stage_results
    assert (read.outcome, read.rank_results[0].model_info.model_type) == (OUTCOME_APPLIED, "fake")
    assert fleet.stage("a").routable


async def test_an_answer_that_is_too_large_is_refused_and_its_stage_stays_reachable(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [v.TensorDigest(name=f"{number}-" + "x" * (1 << 20)) for number in range(64)]
    report = v.CheckReport(tensors=digests)

    async def check_weights(_engine: FakeEngine, request: v.CheckWeightsRequest, _call: Call) -> v.CheckReport:
        return report if request.per_tensor else v.CheckReport()

    monkeypatch.setattr(FakeEngine, "check_weights", check_weights)
    commander = fleet.server.coordinator.roster.slots["a"].commander
    request = v.CheckWeightsRequest(header=header("a", timeout_s=10.0), per_tensor=True)
    (result,) = (await fleet.stub.CheckWeights(request)).stage_results
    assert (result.outcome, result.error.reason) == (OUTCOME_REJECTED, "MESSAGE_TOO_LARGE")
    request.per_tensor = False
    assert (await fleet.stub.CheckWeights(request)).state == OPERATION_STATE_OK
    assert fleet.server.coordinator.roster.slots["a"].commander is commander, "the link broke"


async def test_the_sdk_takes_a_message_again_for_another_call(fleet: InProcessFleet) -> None:
    request = v.FlushCacheRequest()
    async with await aio.connect(fleet.server.address) as client:
        first = await client.call(request, slots=["a"], timeout_s=5.0)
        again = await client.call(request)
    assert first.operation_id != again.operation_id
    assert [len(operation.stage_results) for operation in (first, again)] == [1, 2]
    assert request == v.FlushCacheRequest()


async def test_a_caller_that_leaves_does_not_undo_the_operation(fleet: InProcessFleet) -> None:
    release, begun = asyncio.Event(), asyncio.Event()

    async def hold(engine: FakeEngine, method: str, call: Call) -> None:
        begun.set()
        await release.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = hold
    request = v.PauseGenerationRequest(header=header(request_id=new_uuid7(), timeout_s=10))
    calling = asyncio.ensure_future(fleet.stub.PauseGeneration(request))
    await begun.wait()
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    release.set()
    operation = await fleet.stub.PauseGeneration(request)
    assert (operation.state, operation.replayed) == (OPERATION_STATE_OK, True)


async def test_a_coordinator_that_gives_no_answer_is_named_with_what_to_do(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows then whether the verb has had its effect."""
    monkeypatch.setattr("rlctl.client.connection.REPLY_S", 0.2)
    async with ChaosProxy(fleet.server.address) as proxy, await aio.connect(proxy.address) as client:
        proxy.blackhole = True
        with pytest.raises(RlctlError) as caught:
            await client.call(v.PauseGenerationRequest(), timeout_s=0.1, request_id=(mine := new_uuid7()))
    assert (caught.value.reason, caught.value.outcome) == (Reason.DEADLINE_EXCEEDED, OUTCOME_UNKNOWN)
    assert f"the coordinator at {proxy.address} gave no answer to PauseGeneration" in str(caught.value)
    assert mine in caught.value.next_step


async def test_validate_only_changes_nothing_and_names_the_targets(fleet: InProcessFleet) -> None:
    request = v.PauseGenerationRequest(header=RequestHeader(validate_only=True))
    operation = await fleet.stub.PauseGeneration(request)
    assert operation.validate_only
    assert list(operation.targets) == ["a", "b"]
    assert fleet.stage("a").routable
    assert not fleet.server.coordinator.operations.newest_first("", 0)


async def test_a_zero_deadline_is_refused(fleet: InProcessFleet) -> None:
    zero = RequestHeader()
    zero.timeout.SetInParent()
    error = await refusal(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=zero)))
    assert (error.reason, error.field) == (Reason.DEADLINE_INVALID, "header.timeout")


async def test_operations_are_listed_read_and_watched(fleet: InProcessFleet) -> None:
    first = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    second = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    await fleet.stub.GetLoads(v.GetLoadsRequest())
    page = await fleet.stub.ListOperations(coordinator_pb2.ListOperationsRequest(page_size=1))
    assert [o.operation_id for o in page.operations] == [second.operation_id]
    rest = await fleet.stub.ListOperations(coordinator_pb2.ListOperationsRequest(page_token=page.next_page_token))
    assert [o.operation_id for o in rest.operations] == [first.operation_id]
    watched = [
        o
        async for o in fleet.stub.WatchOperation(coordinator_pb2.WatchOperationRequest(operation_id=first.operation_id))
    ]
    assert [o.state for o in watched] == [OPERATION_STATE_OK]
    missing = coordinator_pb2.GetOperationRequest(operation_id="none")
    assert (await refusal(fleet.stub.GetOperation(missing))).reason is Reason.OPERATION_NOT_FOUND


async def test_operations_are_listed_by_the_coordinators_clock(fleet: InProcessFleet) -> None:
    """The clock of a client, which makes the ids of its requests, may be hours ahead."""
    ahead = "fff00000-0000-7000-8000-000000000000"
    first = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=RequestHeader(request_id=ahead)))
    second = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    third = await fleet.stub.FlushCache(v.FlushCacheRequest())
    listed, token = [], ""
    for _ in range(3):
        request = coordinator_pb2.ListOperationsRequest(page_size=1, page_token=token)
        page = await fleet.stub.ListOperations(request)
        listed += [operation.operation_id for operation in page.operations]
        token = page.next_page_token
    assert listed == [third.operation_id, second.operation_id, first.operation_id]
    assert token == ""
    foreign = await refusal(fleet.stub.ListOperations(coordinator_pb2.ListOperationsRequest(page_token=ahead)))
    assert (foreign.reason, foreign.field) == (Reason.FIELD_INVALID, "page_token")


async def test_a_cancelled_operation_that_nobody_started_has_no_effect(fleet: InProcessFleet) -> None:
    release, begun = asyncio.Event(), asyncio.Event()

    async def hold(engine: FakeEngine, method: str, call: Call) -> None:
        if engine.config.rank == 1:
            begun.set()
            await release.wait()

    fake_engine.FAULTS[fleet.specs[1].model_path, 1] = hold
    mine = new_uuid7()
    request = v.PauseGenerationRequest(header=header("b", request_id=mine, timeout_s=20))
    pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(request))
    await begun.wait()
    cancelling = asyncio.ensure_future(
        fleet.stub.CancelOperation(coordinator_pb2.CancelOperationRequest(operation_id=mine))
    )
    commands = fleet.workers["b", 1]._follower.worker._withdrawable
    await eventually(lambda: any(command.withdrawn for command in commands.values()))
    release.set()
    operation = await pausing
    await cancelling
    assert operation.state == results_pb2.OPERATION_STATE_CANCELLED
    assert operation.stage_results[0].outcome == OUTCOME_REJECTED
    assert fleet.stage("b").routable


async def test_disabled_stages_are_not_routable_and_still_targets(fleet: InProcessFleet) -> None:
    request = coordinator_pb2.SetStageEnabledRequest(slots=["a"], enabled=False)
    await fleet.stub.SetStageEnabled(request)
    assert fleet.stage("a").not_routable == "disabled"
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert list(operation.targets) == ["a", "b"]
    bad = coordinator_pb2.SetStageEnabledRequest(slots=["b", "zz"], enabled=False)
    assert (await refusal(fleet.stub.SetStageEnabled(bad))).field == "slots[1]"
    assert fleet.stage("b").enabled


async def test_a_stage_that_lacks_a_verb_is_skipped_with_the_reason(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = fleet.server.coordinator.roster.slots["a"]
    registration = StageRegistration()
    registration.CopyFrom(slot.record.registration)
    registration.capabilities.verbs.remove("FlushCache")
    registration.capabilities.unsupported["FlushCache"] = "it has no cache"
    slot.fill(registration)
    operation = await fleet.stub.FlushCache(v.FlushCacheRequest())
    assert operation.state == OPERATION_STATE_OK
    assert [r.outcome for r in operation.stage_results] == [OUTCOME_SKIPPED, OUTCOME_APPLIED]
    assert operation.stage_results[0].error.message == "it has no cache"
    alone = await refusal(fleet.stub.FlushCache(v.FlushCacheRequest(header=header("a"))))
    assert alone.reason is Reason.UNSUPPORTED_BY_ALL


async def test_unary_verbs_on_a_stage_need_the_held_epoch(fleet: InProcessFleet) -> None:
    async with open_channel(fleet.stages["b"].address) as channel:
        stub = StageServiceStub(channel)
        read = await stub.GetServerInfo(v.GetServerInfoRequest())
        assert [r.server_info.engine for r in read.rank_results] == ["fake", "fake"]
        without = await stub.PauseGeneration(v.PauseGenerationRequest())
        assert (without.outcome, without.error.reason) == (OUTCOME_REJECTED, "EPOCH_REQUIRED")
        epoch = read.header.fleet_epoch
        request = v.PauseGenerationRequest(header=RequestHeader(fence=common.Fence(fleet_epoch=epoch)))
        held = await stub.PauseGeneration(request)
        assert held.outcome == OUTCOME_APPLIED
        assert len(held.rank_results) == 2
    assert isinstance(held, results_pb2.StageResult)


async def test_what_a_stage_is_asked_to_try_is_not_done(fleet: InProcessFleet) -> None:
    mine = RequestHeader(fence=common.Fence(fleet_epoch=fleet.server.coordinator.roster.epoch), validate_only=True)
    async with open_channel(fleet.stages["b"].address) as channel:
        stub = StageServiceStub(channel)
        spoilt = v.CheckWeightsRequest(header=mine, action=v.CHECK_ACTION_RESET_TENSORS)
        for tried in (stub.PauseGeneration(v.PauseGenerationRequest(header=mine)), stub.CheckWeights(spoilt)):
            result = await tried
            assert (result.outcome, result.error.field) == (OUTCOME_REJECTED, "header.validate_only")
            assert result.state == common.STAGE_STATE_READY
    assert fleet.stage("b").routable


async def test_a_command_stream_that_cannot_be_read_is_ended_with_the_reason(fleet: InProcessFleet) -> None:
    async with open_channel(fleet.stages["a"].address) as channel:
        call = channel.stream_stream("/rlctl.v1.StageService/Control")()
        await call.write(b"\xff")
        error = await refusal(call.read())
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "ControlRequest")
    assert fleet.stage("a").routable


async def test_a_followers_unary_verbs_read_and_refuse_to_act_alone(fleet: InProcessFleet) -> None:
    from rlctl.v1.worker_pb2_grpc import WorkerServiceStub

    address = fleet.stages["b"].config.followers[0]
    async with open_channel(address) as channel:
        stub = WorkerServiceStub(channel)
        info = await stub.GetModelInfo(v.GetModelInfoRequest())
        assert (info.coordinates.rank, info.outcome) == (1, OUTCOME_APPLIED)
        alone = await stub.PauseGeneration(v.PauseGenerationRequest())
        assert (alone.outcome, alone.error.reason) == (OUTCOME_REJECTED, "NOT_RANK_ZERO")
    assert fleet.stage("b").routable


async def test_a_pause_that_no_target_has_is_refused_and_one_that_some_have_skips_the_others(
    fleet: InProcessFleet,
) -> None:
    slots = fleet.server.coordinator.roster.slots
    b = slots["b"].record.registration.capabilities
    b.pause_modes[:] = [common.PAUSE_MODE_RETRACT, common.PAUSE_MODE_DRAIN]
    request = v.PauseGenerationRequest()  # which is abort
    operation = await fleet.stub.PauseGeneration(request)
    outcomes = {result.slot: result.outcome for result in operation.stage_results}
    assert outcomes == {"a": common.OUTCOME_APPLIED, "b": common.OUTCOME_SKIPPED}
    request.header.target.slots.append("b")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fleet.stub.PauseGeneration(request)
    refused = from_grpc(caught.value)
    assert (refused.reason, refused.field) == (Reason.UNSUPPORTED_BY_ALL, "mode")
    assert "b has no pause mode abort; it has: retract, drain" in refused.message
    assert not fleet.stage("b").report.paused
