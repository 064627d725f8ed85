"""What must hold when links, disks, stages and callers do their worst."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from journal_faults import full_disk
from updating import abort, begin, commit, digest, join, refusal, unreachable, version_of, weights, write
from waiting import eventually

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.ports import new_uuid7
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport.channel import open_channel
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.control_pb2 import CommandResult
from rlctl.v1.fleet_pb2 import StageRegistration
from rlctl.v1.journal_pb2 import OperationRecord, SlotRecord
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_RUNNING,
    OPERATION_STATE_UNKNOWN,
    Operation,
    StageResult,
)
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

Fleets = Callable[..., Any]


async def update(fleet: InProcessFleet, text: str) -> Operation:
    """A whole update."""
    plan = await begin(fleet, f"label of {text}")
    if not plan.groups[0].formed:
        await join(fleet, plan)
    await write(fleet, plan, text)
    return await commit(fleet, plan, digest(text))


async def assert_updatable(fleet: InProcessFleet) -> None:
    operation = await update(fleet, "fresh")
    assert operation.state == OPERATION_STATE_OK, operation
    assert set(weights(fleet)) == {"fresh"}
    assert all(stage.routable for stage in fleet.server.coordinator.roster.fleet().stages)


# Links.


async def test_an_update_that_was_aborted_while_a_stage_was_away_ends_there_when_it_is_back(
    fleet: InProcessFleet,
) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    async with unreachable(fleet, "a"):
        operation = await abort(fleet, plan)
        outcomes = {result.slot: result.outcome for result in operation.stage_results}
        assert outcomes == {"a": common.OUTCOME_UNKNOWN, "b": common.OUTCOME_DIRTY}
        assert operation.state == OPERATION_STATE_UNKNOWN
    await eventually(lambda: fleet.stage("a").state == common.STAGE_STATE_DIRTY, 10)
    await assert_updatable(fleet)


async def test_a_rank_that_refuses_the_abort_is_asked_again(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    refusals = []

    async def refuse_once(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "abort_update" and not refusals:
            refusals.append(name)
            raise Reason.DEADLINE_EXCEEDED.error("busy")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse_once
    await abort(fleet, plan)
    assert refusals
    await eventually(lambda: {fleet.stage(s).state for s in "ab"} == {common.STAGE_STATE_DIRTY})
    await assert_updatable(fleet)


async def test_a_stage_whose_pause_is_not_known_is_resumed_by_the_next_update(make_fleet: Fleets) -> None:
    async with make_fleet(a=1, b=2) as fleet, AsyncExitStack() as away:
        fleet.server.coordinator._peers._unanswered._within_s = 0.1

        async def break_link(engine: FakeEngine, name: str, call: Call) -> None:
            if name == "pause_generation" and engine.config.tp_size == 1:
                fake_engine.FAULTS.clear()
                await away.enter_async_context(unreachable(fleet, "a"))

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = break_link
        plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT))
        await join(fleet, plan)
        assert (await write(fleet, plan, "w1")).state != OPERATION_STATE_OK
        await abort(fleet, plan)
        await away.aclose()
        await fleet.until(lambda stages: all(s.state not in (5, common.STAGE_STATE_UNREACHABLE) for s in stages))
        await assert_updatable(fleet)


async def test_requests_of_a_stage_that_was_left_out_end_with_the_version_that_they_run_on(
    make_fleet: Fleets, checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    specs = [StageSpec(slot, checkpoint("one"), options={"pace": "0.02"}) for slot in "ab"]
    async with InProcessFleet(tmp_path / "slow.db", specs) as fleet:
        channel = open_channel(fleet.stages["a"].rollout_address)
        request = rollout.GenerateRequest(text="x", sampling_params=rollout.SamplingParams(max_new_tokens=10_000))
        call = RolloutServiceStub(channel).GenerateStream(request)
        parts = aiter(call)
        await anext(parts)
        async with unreachable(fleet, "a"):
            too_few = await refusal(begin(fleet, options=v.UpdateOptions(quorum=2)))
            assert "there are 1 targets; excluded: a (absent)" in too_few.message
            assert too_few.next_step == "Wait for more stages, or lower the quorum."
            plan = await begin(fleet)
            assert [stage.slot for stage in plan.excluded] == ["a"]
        await eventually(lambda: fleet.stage("a").routable, 10)
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK

        async def rest() -> None:
            async for part in parts:
                del part

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(5):
                await rest()
        assert "STAGE_NOT_SERVING" in (caught.value.details() or "")
        await channel.close()


# Disks.


async def test_an_update_that_cannot_be_recorded_is_aborted_everywhere(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    async with full_disk(fleet):
        operation = await commit(fleet, plan, digest("w1"))
        assert operation.state == OPERATION_STATE_FAILED
        assert operation.error.reason == "JOURNAL_FAILED"
    assert {fleet.stage(slot).state for slot in "ab"} == {common.STAGE_STATE_DIRTY}
    assert version_of(fleet) == ("initial", 1)
    await assert_updatable(fleet)


async def test_a_full_disk_costs_a_staged_update_and_nothing_that_serves(fleet: InProcessFleet) -> None:
    plan = await begin(fleet, apply=v.APPLY_MODE_STAGED, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    async with full_disk(fleet):
        operation = await commit(fleet, plan, digest("w1"))
    assert operation.error.reason == "JOURNAL_FAILED"
    await assert_untouched(fleet, operation)


@pytest.mark.parametrize("apply", [v.APPLY_MODE_IN_PLACE, v.APPLY_MODE_STAGED])
async def test_a_disk_that_fills_while_a_checkpoint_is_inspected_costs_nothing_that_serves(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], apply: v.ApplyMode.ValueType
) -> None:
    async with contextlib.AsyncExitStack() as filled:

        async def fill(engine: FakeEngine, name: str, call: Call) -> None:
            if name == "inspect_checkpoint":
                await filled.enter_async_context(full_disk(fleet))

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fill
        request = v.UpdateWeightsFromDiskRequest(
            model_path=checkpoint("two"), apply=apply, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)
        )
        operation = await fleet.stub.UpdateWeightsFromDisk(request)
    fake_engine.FAULTS.clear()
    assert operation.error.reason == "JOURNAL_FAILED"
    await assert_untouched(fleet, operation)


async def test_a_full_disk_costs_a_delta_without_changes_nothing_that_serves(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    base = await commit(fleet, plan, digest("w1"))
    plan = await begin(fleet, "w1-again", kind=v.UPDATE_KIND_DELTA, base=base.weight_version)
    async with full_disk(fleet):
        operation = await commit(fleet, plan, digest("w1"))
    assert operation.error.reason == "JOURNAL_FAILED"
    await assert_untouched(fleet, operation, "step-1")


async def assert_untouched(fleet: InProcessFleet, operation: Operation, label: str = "initial") -> None:
    assert operation.state == OPERATION_STATE_FAILED
    assert version_of(fleet)[0] == label
    assert all(fleet.stage(slot).routable for slot in "ab")
    await assert_updatable(fleet)


async def test_an_update_whose_operation_cannot_be_recorded_leaves_nothing_on_record(fleet: InProcessFleet) -> None:
    async with full_disk(fleet, "operation"):
        assert (await refusal(begin(fleet))).reason is Reason.JOURNAL_FAILED
    assert list(fleet.server.coordinator._journal.read("update")) == []
    await assert_updatable(fleet)


@pytest.mark.parametrize("expired", [False, True])
async def test_no_record_of_an_update_outlives_an_end_that_could_not_be_recorded(
    fleet: InProcessFleet, *, expired: bool
) -> None:
    coordinator = fleet.server.coordinator
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    async with full_disk(fleet, "operation"):
        assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK
    assert [key for key, _ in coordinator._journal.read("update")] == [plan.update_id]
    if expired:
        coordinator.operations._retained = 0
        await coordinator.operations.drop_expired()
    else:
        await coordinator.operations.record_ended()
    assert list(coordinator._journal.read("update")) == []


async def test_an_abort_needs_no_journal(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    async with full_disk(fleet):
        operation = await abort(fleet, plan)
        assert {result.outcome for result in operation.stage_results} == {common.OUTCOME_DIRTY}
    await assert_updatable(fleet)


async def test_what_is_refused_for_the_journal_has_not_happened(fleet: InProcessFleet) -> None:
    async with full_disk(fleet):
        error = await refusal(fleet.stub.SetStageEnabled(rpc.SetStageEnabledRequest(slots=["a"], enabled=False)))
        assert error.reason is Reason.JOURNAL_FAILED
        error = await refusal(fleet.stub.DeregisterStage(rpc.DeregisterStageRequest(slot="b")))
        assert error.reason is Reason.JOURNAL_FAILED
    assert fleet.stage("a").enabled
    assert fleet.stage("b").routable


async def test_an_end_that_could_not_be_recorded_is_once_the_journal_takes_it(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.coordinator.updates.manager.LOOK_S", 0.05)
    fleet.server.coordinator.updates._looking.cancel()  # type: ignore[union-attr]
    fleet.server.coordinator.updates.start()
    filled = AsyncExitStack()

    async def fill(_: FakeEngine, name: str, __: Call) -> None:
        if name == "pause_generation":
            fake_engine.FAULTS.clear()
            await filled.enter_async_context(full_disk(fleet))

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fill
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert operation.state == OPERATION_STATE_OK

    def recorded() -> int:
        rows = dict(fleet.server.coordinator._journal.read("operation"))
        return OperationRecord.FromString(rows[operation.operation_id]).operation.state

    assert recorded() == OPERATION_STATE_RUNNING
    await filled.aclose()
    await eventually(lambda: recorded() == OPERATION_STATE_OK)


async def test_what_attached_to_a_call_that_could_not_be_recorded_is_refused_with_it(fleet: InProcessFleet) -> None:
    journal, write_through = fleet.server.coordinator._journal, fleet.server.coordinator._journal.write
    asked = asyncio.Event()

    async def fail_late(changes: Sequence[Any]) -> None:
        await asked.wait()
        raise Reason.JOURNAL_FAILED.error("no space is left")

    journal.write = fail_late  # type: ignore[method-assign]
    request = v.PauseGenerationRequest(header=RequestHeader(request_id=new_uuid7()))
    first = asyncio.ensure_future(fleet.stub.PauseGeneration(request))
    await eventually(lambda: fleet.server.coordinator.operations._runs)
    second = asyncio.ensure_future(fleet.stub.PauseGeneration(request))
    await asyncio.sleep(0.1)
    asked.set()
    async with asyncio.timeout(5):
        assert (await refusal(first)).reason is Reason.JOURNAL_FAILED
        assert (await refusal(second)).reason is Reason.JOURNAL_FAILED
    journal.write = write_through  # type: ignore[method-assign]
    again = await fleet.stub.PauseGeneration(request)
    assert (again.state, again.replayed) == (OPERATION_STATE_OK, False)


async def test_what_is_not_known_stays_unknown_when_the_journal_fails_too(fleet: InProcessFleet) -> None:
    async def fail(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "continue_generation":
            raise Reason.ENGINE_FAILED.error("no", outcome=common.OUTCOME_UNKNOWN)

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fail
    async with full_disk(fleet, "slot"):
        operation = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert operation.state == OPERATION_STATE_UNKNOWN


async def test_a_pause_is_taken_back_also_while_nobody_can_be_quarantined(make_fleet: Fleets) -> None:
    """Simulation, seed 331586: a stage was said to be paused that had been continued."""
    unknown = {"pause_generation": "a", "continue_generation": "b"}

    async with make_fleet(a=1, b=1, c=1) as fleet:

        async def fail(engine: FakeEngine, name: str, call: Call) -> None:
            if name in unknown and engine is fleet.stages[unknown[name]]._engine:
                raise Reason.ENGINE_FAILED.error("no", outcome=common.OUTCOME_UNKNOWN)

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fail
        async with full_disk(fleet, "slot"):
            operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
        outcomes = {result.slot: result.outcome for result in operation.stage_results}
        assert outcomes == {"a": common.OUTCOME_UNKNOWN, "b": common.OUTCOME_UNKNOWN, "c": common.OUTCOME_REJECTED}
        assert operation.state == OPERATION_STATE_UNKNOWN
        assert not fleet.stage("c").report.paused
        await fleet.until(lambda stages: [bool(stage.quarantine.reason) for stage in stages] == [True, True, False])


@asynccontextmanager
async def unpublished(journal: Path, spec: StageSpec) -> AsyncIterator[InProcessFleet]:
    """A stage that registers while the journal does not take its model's first version; in the end it does."""
    fleet = InProcessFleet(journal, [spec])
    await fleet.start_coordinator()
    async with full_disk(fleet, "model"):
        fleet.server.coordinator.roster._journal = _Registering(fleet.server.coordinator._journal)
        await fleet.start_stage(spec)
        yield fleet
    await fleet.until(lambda stages: stages[0].routable)
    await fleet.__aexit__(None, None, None)


async def test_the_first_version_is_published_once_the_journal_takes_it(
    checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    async with unpublished(tmp_path / "late.db", StageSpec("a", checkpoint("one"))) as fleet:
        stale = common.STAGE_STATE_STALE
        await eventually(lambda: [s.state for s in fleet.server.coordinator.roster.fleet().stages] == [stale])


async def test_reports_that_cannot_be_taken_in_do_not_pile_up(
    checkpoint: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with unpublished(tmp_path / "late.db", StageSpec("a", checkpoint("one"))) as fleet:
        peers, roster = fleet.server.coordinator._peers, fleet.server.coordinator.roster
        await eventually(lambda: "could not be taken in" in caplog.text)
        slot = roster.slots["a"]
        for _ in range(20):
            peers._reported(slot, slot.report)
        assert len(peers._reports) > 20
        await eventually(lambda: caplog.text.count("could not be taken in") > 20)
        await eventually(lambda: len(peers._reports) == 1)


class _Registering:
    """A journal that takes a registration's records whatever else it refuses."""

    def __init__(self, journal: Any) -> None:
        self._write = type(journal).write.__get__(journal)

    async def write(self, changes: Sequence[Any]) -> None:
        await self._write(changes)


# Races.


async def test_an_abort_while_the_targets_are_prepared_leaves_nothing_open(
    checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    specs = [StageSpec(slot, checkpoint("one"), options={"pace": "0.02"}) for slot in "ab"]
    async with InProcessFleet(tmp_path / "slow.db", specs) as fleet:
        channel = open_channel(fleet.stages["a"].rollout_address)
        request = rollout.GenerateRequest(text="x", sampling_params=rollout.SamplingParams(max_new_tokens=50))
        generating = asyncio.ensure_future(RolloutServiceStub(channel).Generate(request))
        await eventually(lambda: fleet.stages["a"]._engine._running)
        plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_DRAIN))
        await join(fleet, plan)
        writing = asyncio.ensure_future(write(fleet, plan, "w1"))
        await eventually(lambda: fleet.stage("b").report.paused)
        operation = await abort(fleet, plan)
        assert {result.outcome for result in operation.stage_results} == {common.OUTCOME_REJECTED}
        assert (await writing).error.reason == "CANCELLED"
        await generating
        await fleet.until(lambda stages: all(stage.routable for stage in stages))
        assert set(weights(fleet)) == {"one"}
        await assert_updatable(fleet)
        await channel.close()


async def test_nothing_is_written_once_an_update_is_decided(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    late: list[Operation] = []

    async def write_late(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "check_weights" and not late:
            late.append(await write(fleet, plan, "late"))

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = write_late
    assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK
    assert late[0].state == OPERATION_STATE_FAILED
    assert set(weights(fleet)) == {"w1"}


async def test_a_target_that_is_restarted_before_publishing_has_not_confirmed(make_fleet: Fleets) -> None:
    async with make_fleet(lease_s=0.5, a=1, b=1, x=1) as fleet, unreachable(fleet, "x"):
        plan = await begin(fleet)
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        committing = asyncio.ensure_future(commit(fleet, plan, digest("w1")))
        await eventually(lambda: fleet.stage("a").report.update_committed)
        await fleet.stages["a"].stop()
        await fleet.start_stage(fleet.specs[0])
        operation = await committing
        assert operation.state == OPERATION_STATE_UNKNOWN
        assert version_of(fleet) == ("initial", 1)
        journal = fleet.server.coordinator._journal
        incarnations = [SlotRecord.FromString(body).incarnation for key, body in journal.read("slot") if key == "a"]
        assert incarnations == [2] == [fleet.stage("a").incarnation]


async def test_repeats_that_come_together_are_carried_out_once(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    request = v.UpdateWeightsFromDiskRequest(
        header=RequestHeader(request_id=new_uuid7()), model_path=checkpoint("two"), weight_version="two"
    )
    ended = await asyncio.gather(*(fleet.stub.UpdateWeightsFromDisk(request) for _ in range(3)))
    assert {operation.operation_id for operation in ended} == {request.header.request_id}
    assert version_of(fleet) == ("two", 2)
    header = RequestHeader(request_id=new_uuid7())
    begun = u.BeginWeightUpdateRequest(header=header, model="actor", version="three")
    plans = await asyncio.gather(*(fleet.stub.BeginWeightUpdate(begun) for _ in range(3)))
    assert len({plan.fencing_token for plan in plans}) == 1


async def test_an_id_that_was_forgotten_is_refused(fleet: InProcessFleet) -> None:
    fleet.server.coordinator.operations._retained = 3
    first = v.PauseGenerationRequest(header=RequestHeader(request_id=new_uuid7()))
    await fleet.stub.PauseGeneration(first)
    for _ in range(5):
        await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert (await refusal(fleet.stub.PauseGeneration(first))).reason is Reason.REQUEST_ID_EXPIRED
    await fleet.channel.close()
    await fleet.server.stop()
    await fleet.start_coordinator(fleet.server.address)
    assert (await refusal(fleet.stub.PauseGeneration(first))).reason is Reason.REQUEST_ID_EXPIRED


async def test_an_id_has_one_spelling(fleet: InProcessFleet) -> None:
    for wrong in (new_uuid7().upper(), "{" + new_uuid7() + "}", "urn:uuid:" + new_uuid7()):
        request = v.PauseGenerationRequest(header=RequestHeader(request_id=wrong))
        error = await refusal(fleet.stub.PauseGeneration(request))
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "header.request_id")


# Lies.


def another_slot(result: StageResult) -> None:
    result.slot = "a"


def another_incarnation(result: StageResult) -> None:
    result.incarnation = 99


def another_epoch(result: StageResult) -> None:
    result.header.fleet_epoch = 77


def no_ranks(result: StageResult) -> None:
    del result.rank_results[:]


def worse_ranks(result: StageResult) -> None:
    result.rank_results[1].outcome = common.OUTCOME_DIRTY


def strange_ranks(result: StageResult) -> None:
    result.rank_results[1].coordinates.rank = 77


@pytest.mark.parametrize(
    "lie", [another_slot, another_incarnation, another_epoch, no_ranks, worse_ranks, strange_ranks]
)
async def test_an_answer_that_contradicts_itself_is_unknown(
    fleet: InProcessFleet, lie: Callable[[StageResult], None]
) -> None:
    stage = fleet.stages["b"]._stage
    truth = stage._result

    def lying(*arguments: Any) -> CommandResult:
        result = truth(*arguments)
        lie(result.stage)
        return result

    stage._result = lying  # type: ignore[method-assign]
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert operation.state == OPERATION_STATE_UNKNOWN
    outcomes = {result.slot: result.outcome for result in operation.stage_results}
    assert outcomes == {"a": common.OUTCOME_REJECTED, "b": common.OUTCOME_UNKNOWN}
    assert operation.stage_results[1].error.reason == "ANSWER_INVALID"
    assert fleet.stage("b").quarantine.reason == "ANSWER_INVALID"


async def test_a_commit_needs_the_id_of_an_update(fleet: InProcessFleet) -> None:
    pause = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    request = u.CommitWeightUpdateRequest(update_id=pause.operation_id, fencing_token=1)
    assert (await refusal(fleet.stub.CommitWeightUpdate(request))).reason is Reason.UPDATE_NOT_FOUND


# Bad input.


@pytest.mark.parametrize("address", ["127.0.0.1:1", "another"])
async def test_a_living_stage_is_not_replaced_by_what_cannot_be_found(fleet: InProcessFleet, address: str) -> None:
    registration = StageRegistration()
    registration.CopyFrom(fleet.stage("a").registration)
    registration.boot_id = "impostor"
    registration.address = fleet.stage("b").registration.address if address == "another" else address
    error = await refusal(fleet.stub.RegisterStage(rpc.RegisterStageRequest(registration=registration)))
    assert error.reason in (Reason.UNREACHABLE, Reason.INCARNATION_FENCED)
    assert fleet.stage("a").routable
    assert fleet.stage("a").incarnation == 1


async def test_an_update_for_some_stages_of_a_model_is_refused(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    header = RequestHeader(target=Target(slots=["b"]))
    request = v.UpdateWeightsFromDiskRequest(header=header, model_path=checkpoint("two"))
    assert (await refusal(fleet.stub.UpdateWeightsFromDisk(request))).field == "header.target"
    begun = u.BeginWeightUpdateRequest(header=header, model="actor", version="x")
    assert (await refusal(fleet.stub.BeginWeightUpdate(begun))).field == "header.target"
    assert set(weights(fleet)) == {"one"}


async def test_a_digest_that_is_missing_is_noticed_before_anything_is_loaded(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    options = v.UpdateOptions(verify=common.VERIFICATION_LEVEL_EXPECTED)
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), options=options)
    assert (await refusal(fleet.stub.UpdateWeightsFromDisk(request))).field == "expected_digest"
    assert set(weights(fleet)) == {"one"}
    plan = await begin(fleet, options=options)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    assert (await refusal(commit(fleet, plan))).field == "expected_digest"
    assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK, "the update was still open"


async def test_a_single_target_is_not_called_verified_by_its_replicas(
    make_fleet: Fleets, checkpoint: Callable[[str], str]
) -> None:
    async with make_fleet(a=1) as fleet:
        request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
        operation = await fleet.stub.UpdateWeightsFromDisk(request)
        assert operation.stage_results[0].verified == common.VERIFICATION_LEVEL_NONE
        request.options.verify = common.VERIFICATION_LEVEL_REPLICA
        error = await refusal(fleet.stub.UpdateWeightsFromDisk(request))
        assert error.reason is Reason.VERIFICATION_UNREACHABLE


async def test_a_group_that_nobody_comes_to_takes_no_stage_out_of_service(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    waiting = asyncio.Event()

    original = FakeEngine.init_weights_update_group

    async def slow(self: FakeEngine, request: v.InitWeightsUpdateGroupRequest, call: Call) -> Any:
        if not request.probe_only:
            await waiting.wait()
        return await original(self, request, call)

    FakeEngine.init_weights_update_group = slow  # type: ignore[method-assign]
    try:
        header = RequestHeader(fence=common.Fence(update_id=plan.update_id), timeout=duration(1))
        operation = await join(fleet, plan, header=header)
        assert operation.state == OPERATION_STATE_UNKNOWN
        # Nothing else had to wait for it.
        assert (await fleet.stub.FlushCache(v.FlushCacheRequest(header=_within(plan)))).state == OPERATION_STATE_OK
    finally:
        FakeEngine.init_weights_update_group = original  # type: ignore[method-assign]
        waiting.set()
    await abort(fleet, plan)
    assert all(fleet.stage(slot).routable for slot in "ab")


def _within(plan: u.BeginWeightUpdateResponse) -> RequestHeader:
    return RequestHeader(fence=common.Fence(update_id=plan.update_id))
