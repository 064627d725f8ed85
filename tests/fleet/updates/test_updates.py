"""Weight updates as sessions: published last, all targets or said so, nothing paused without an owner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from updating import abort, begin, commit, digest, fault, join, refusal, unreachable, version_of, weights, write
from waiting import eventually

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.transaction.commit import Commit
from rlctl.coordinator.updates.manager import Graces
from rlctl.engine import Call
from rlctl.ports import Delete, Put, new_uuid7
from rlctl.sdk import aio
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_DIRTY, OUTCOME_REJECTED, RequestHeader, Target
from rlctl.v1.common_pb2 import WeightVersion as V
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_PARTIAL,
)


async def test_an_update_writes_to_the_journal_five_times(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK
    journal = fleet.server.coordinator._journal
    write_through, writes = journal.write, []

    async def record(changes: Sequence[Put | Delete]) -> None:
        writes.append(sorted({f"-{each.kind}" if isinstance(each, Delete) else each.kind for each in changes}))
        await write_through(changes)

    monkeypatch.setattr(journal, "write", record)
    plan = await begin(fleet, version="step-2")
    await write(fleet, plan, "w2")
    assert (await commit(fleet, plan, digest("w2"))).state == OPERATION_STATE_OK
    assert writes == [
        ["model", "operation", "update"],  # begun
        ["operation"],  # the write of the source, and its end
        ["operation"],
        ["model", "update"],  # published
        ["-update", "audit", "operation"],
    ]


async def test_the_first_version_is_the_checkpoint_of_the_launch(fleet: InProcessFleet) -> None:
    assert version_of(fleet) == ("initial", 1)
    assert fleet.stage("b").report.weight_version.sequence == 1


async def test_an_update_is_served_by_every_stage_or_by_none(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    assert [(m.slot, m.rank_offset, m.num_ranks) for m in plan.groups[0].members] == [("a", 1, 1), ("b", 2, 2)]
    assert (plan.groups[0].world_size, plan.version.sequence) == (4, 2)
    assert fleet.stage("a").routable, "nothing is paused before the first byte"
    joined = await join(fleet, plan)
    ranks = [[r.group.group_rank for r in s.rank_results] for s in joined.stage_results]
    assert ranks == [[1], [2, 3]]
    await write(fleet, plan, "w1", "w2")
    assert fleet.stage("a").state == common.STAGE_STATE_UPDATING
    assert version_of(fleet) == ("initial", 1)
    operation = await commit(fleet, plan, digest("w1,w2"))
    assert operation.state == OPERATION_STATE_OK
    assert version_of(fleet) == ("step-1", 2)
    assert operation.model_digest == digest("w1,w2")
    assert {r.verified for r in operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    assert {r.evidence for s in operation.stage_results for r in s.rank_results} == {common.EVIDENCE_VERIFIED}
    assert operation.pause_time.ToNanoseconds() > 0
    assert weights(fleet) == ["w1,w2"] * 3
    assert all(fleet.stage(slot).routable for slot in "ab")


async def test_groups_are_kept_until_membership_changes(fleet: InProcessFleet) -> None:
    first = await begin(fleet)
    await join(fleet, first)
    await write(fleet, first, "w1")
    await commit(fleet, first)
    second = await begin(fleet, "step-2")
    assert second.groups[0].formed
    assert second.groups[0].group_name == first.groups[0].group_name
    await write(fleet, second, "w2")
    assert (await commit(fleet, second)).state == OPERATION_STATE_OK
    other = u.BeginWeightUpdateRequest(model="actor", version="x", trainer=u.Trainer(boot_id="another process"))
    third = await fleet.stub.BeginWeightUpdate(other)
    assert not third.groups[0].formed
    assert third.groups[0].generation > second.groups[0].generation


async def test_a_world_size_that_the_roster_does_not_give_is_refused(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    operation = await join(fleet, plan, world_size=3)
    assert operation.state == OPERATION_STATE_FAILED
    assert (operation.error.reason, operation.error.field) == ("FIELD_INVALID", "world_size")
    assert "world_size is 3; one source and the ranks of 2 stages make 4" in operation.error.message


async def test_weights_that_differ_from_what_was_sent_are_never_published(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    operation = await commit(fleet, plan, digest("something else"))
    assert operation.state == OPERATION_STATE_FAILED
    assert operation.error.reason in ("QUORUM_NOT_MET", "DIGEST_MISMATCH")
    assert {r.outcome for r in operation.stage_results} == {OUTCOME_DIRTY}
    assert {r.error.reason for r in operation.stage_results} == {"DIGEST_MISMATCH"}
    assert version_of(fleet) == ("initial", 1)
    assert {fleet.stage(slot).state for slot in "ab"} == {common.STAGE_STATE_DIRTY}
    refused = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert {r.error.reason for r in refused.stage_results} == {"WEIGHTS_DIRTY"}
    stage = fleet.stage("a")
    assert stage.not_routable == f"DIRTY: {stage.quarantine.message}" != "DIRTY: "
    again = await begin(fleet, "step-2")
    await join(fleet, again)
    await write(fleet, again, "w2")
    assert (await commit(fleet, again, digest("w2"))).state == OPERATION_STATE_OK
    assert all(fleet.stage(slot).routable for slot in "ab"), "a full update clears DIRTY and the quarantine"
    assert version_of(fleet)[1] == 3


async def test_one_wrong_rank_is_enough(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    fleet.workers["b", 1]._follower._engine.weights = "off by a byte"
    operation = await commit(fleet, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_FAILED
    outcomes = {r.slot: (r.outcome, r.error.reason) for r in operation.stage_results}
    assert outcomes["b"] == (OUTCOME_DIRTY, "DIGEST_MISMATCH")
    assert version_of(fleet) == ("initial", 1)


async def test_replicas_are_compared_when_the_source_gave_no_digest(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    fleet.stages["a"]._engine.weights = "other"
    operation = await commit(fleet, plan)
    assert operation.state == OPERATION_STATE_FAILED
    assert version_of(fleet) == ("initial", 1)


async def test_with_a_quorum_the_rest_is_published_and_the_operation_is_partial(fleet: InProcessFleet) -> None:
    plan = await begin(fleet, options=v.UpdateOptions(quorum=1))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    fleet.stages["a"]._engine.weights = "other"
    operation = await commit(fleet, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_PARTIAL
    assert version_of(fleet) == ("step-1", 2)
    assert fleet.stage("b").routable
    assert fleet.stage("a").state == common.STAGE_STATE_DIRTY
    assert not fleet.stage("a").routable


async def test_an_abort_before_the_first_byte_leaves_everything_as_it_was(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    operation = await abort(fleet, plan)
    assert operation.state == OPERATION_STATE_FAILED
    assert operation.error.reason == "CANCELLED"
    assert all(fleet.stage(slot).routable for slot in "ab")
    assert version_of(fleet) == ("initial", 1)
    again = await begin(fleet, "step-2")
    assert again.version.sequence == 3, "a reserved sequence is never used again"


async def test_an_abort_past_the_first_byte_leaves_the_targets_dirty(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    operation = await abort(fleet, plan, token=0)
    assert {r.outcome for r in operation.stage_results} == {OUTCOME_DIRTY}
    assert {rank.outcome for r in operation.stage_results for rank in r.rank_results} == {OUTCOME_DIRTY}
    assert {fleet.stage(slot).state for slot in "ab"} == {common.STAGE_STATE_DIRTY}


async def test_a_stage_that_loses_a_rank_while_it_aborts_says_that_it_failed(make_fleet: Callable[..., Any]) -> None:
    """All ranks carry out the abort. A rank is lost before the last of them answers."""
    async with make_fleet(a=1, b=2) as fleet:
        follower = fleet.workers.pop(("b", 1))
        lost: list[asyncio.Task[None]] = []

        async def lose(engine: FakeEngine, method: str, call: Call) -> None:
            if method == "abort_update" and engine.config.tp_size == 2:
                engine._delay = 1.0
                lost.append(asyncio.create_task(lose_rank_1()))

        async def lose_rank_1() -> None:
            await eventually(lambda: not follower._follower._engine._update)
            await asyncio.sleep(0.1)  # its answer arrives
            await follower.stop()

        plan = await begin(fleet)
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = lose
        operation = await abort(fleet, plan)
        await asyncio.gather(*lost)
        whole, failed = operation.stage_results
        assert (failed.slot, failed.state) == ("b", common.STAGE_STATE_FAILED)
        assert failed.outcome == common.OUTCOME_UNKNOWN, "a stage without a rank shows nothing of its weights"
        assert whole.outcome == OUTCOME_DIRTY
        read = await fleet.stub.GetModelInfo(v.GetModelInfoRequest(header=RequestHeader(target=Target(slots=["b"]))))
        paused = await fleet.stub.PauseGeneration(
            v.PauseGenerationRequest(header=RequestHeader(target=Target(slots=["b"])))
        )
        states = [result.state for each in (read, paused) for result in each.stage_results]
        assert states == [common.STAGE_STATE_FAILED] * 2


async def test_an_update_that_its_owner_aborts_for_a_failure_ends_with_its_reason(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    cause = Reason.FIELD_INVALID.error("w has shape (3, 3); actor has (64, 128)", field="weights", next_step="Look.")
    request = u.AbortWeightUpdateRequest(
        update_id=plan.update_id, fencing_token=plan.fencing_token, reason=cause.message, error=cause.detail()
    )
    operation = await fleet.stub.AbortWeightUpdate(request)
    assert operation.state == OPERATION_STATE_FAILED
    assert (operation.error.reason, operation.error.field) == ("FIELD_INVALID", "weights")
    assert operation.error.message == "aborted: w has shape (3, 3); actor has (64, 128)"
    assert operation.error.next_step == "Look."


async def test_an_abort_breaks_a_receive_that_hangs(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    writing = asyncio.ensure_future(write(fleet, plan, "stuck"))
    await fleet.until(lambda stages: stages[0].state == common.STAGE_STATE_UPDATING)
    await eventually(lambda: fleet.stages["a"]._engine._written)
    async with asyncio.timeout(10):
        await abort(fleet, plan)
        operation = await writing
    assert {r.outcome for r in operation.stage_results} == {OUTCOME_DIRTY}


async def test_a_lease_that_is_not_renewed_ends_the_update(fleet: InProcessFleet) -> None:
    plan = await begin(fleet, lease_ttl=duration(2))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    run = fleet.server.coordinator.operations.get(plan.update_id)
    async with asyncio.timeout(15):
        await run.ended.wait()
    assert run.operation.error.reason == "LEASE_EXPIRED"
    assert {result.outcome for result in run.operation.stage_results} == {OUTCOME_DIRTY}
    late = await commit(fleet, plan)
    assert late.state == OPERATION_STATE_FAILED
    # No next update of the owner's is waited for.
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    assert weights(fleet) == ["one"] * 3


BROKEN = Reason.GROUP_FAILED.error("connection closed by peer", outcome=OUTCOME_DIRTY)


async def test_an_owner_that_is_silent_after_a_failed_write_is_not_waited_for(make_fleet: Callable) -> None:
    async with make_fleet(a=1, b=1, graces=Graces(owner_s=0.3)) as fleet:
        plan = await begin(fleet, lease_ttl=duration(1000), renew_interval=duration(0.1))
        await join(fleet, plan)
        assert fleet.server.coordinator.roster.fleet().models[0].update_lease.seconds >= 990
        fault(fleet, 0, 1, "update_weights_from_distributed", BROKEN)
        assert (await write(fleet, plan, "w1")).state == OPERATION_STATE_FAILED
        fake_engine.FAULTS.clear()
        run = fleet.server.coordinator.operations.get(plan.update_id)
        async with asyncio.timeout(10):
            await run.ended.wait()
        assert run.operation.error.reason == "LEASE_EXPIRED"
        assert "was not heard for 0.3 s after a write had failed" in run.operation.error.message
        assert not fleet.server.coordinator.roster.fleet().models[0].HasField("update_lease")
        await fleet.until(lambda stages: all(stage.routable for stage in stages))
        assert version_of(fleet) == ("initial", 1)


@pytest.mark.parametrize("says", [{}, {"renew_interval": duration(100)}])
async def test_an_owner_that_renews_seldom_has_its_whole_lease_after_a_failed_write(
    make_fleet: Callable, says: dict[str, Any]
) -> None:
    """As clients do that know of no grace: they renew every third part of the lease."""
    async with make_fleet(a=1, graces=Graces(owner_s=0.1)) as fleet:
        plan = await begin(fleet, lease_ttl=duration(1000), retries=1, **says)
        await join(fleet, plan)
        fault(fleet, 0, 1, "update_weights_from_distributed", BROKEN)
        assert (await write(fleet, plan, "w1")).state == OPERATION_STATE_FAILED
        fake_engine.FAULTS.clear()
        await asyncio.sleep(1.0)
        assert fleet.server.coordinator.updates.is_open(plan.update_id)


async def test_an_owner_that_is_heard_after_a_failed_write_has_its_whole_lease(make_fleet: Callable) -> None:
    async with make_fleet(a=1, graces=Graces(owner_s=0.5)) as fleet:
        plan = await begin(fleet, lease_ttl=duration(1000), renew_interval=duration(0.1), retries=1)
        await join(fleet, plan)
        fault(fleet, 0, 1, "update_weights_from_distributed", BROKEN)
        assert (await write(fleet, plan, "w1")).state == OPERATION_STATE_FAILED
        fake_engine.FAULTS.clear()
        renewal = u.RenewLeaseRequest(update_id=plan.update_id, fencing_token=plan.fencing_token)
        await fleet.stub.RenewLease(renewal)
        await asyncio.sleep(1.0)
        assert fleet.server.coordinator.updates.is_open(plan.update_id)
        again = u.RetryWeightUpdateRequest(
            update_id=plan.update_id, fencing_token=plan.fencing_token, failed_attempt=plan.attempt
        )
        plan = await fleet.stub.RetryWeightUpdate(again)
        await join(fleet, plan)
        assert (await write(fleet, plan, "w1")).state == OPERATION_STATE_OK
        assert (await commit(fleet, plan)).state == OPERATION_STATE_OK


async def test_a_stage_is_not_drained_while_an_update_counts_on_it(fleet: InProcessFleet) -> None:
    async with await aio.connect(fleet.server.address) as client:
        assert await client.busy(["a", "b"]) == {}
        plan = await begin(fleet)
        assert await client.busy("a") == {"a": "an update of actor is open"}
        with pytest.raises(RlctlError, match="a: an update of actor is open") as caught:
            await client.drain(["a"], timeout_s=0.5)
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
        await abort(fleet, plan)
        told: list[dict[str, str]] = []
        after = await client.drain("a", reason="maintenance", on_busy=told.append)
        assert told[-2:] == [{}, {}]
        assert [(s.enabled, s.disabled_reason) for s in after.stages] == [(False, "maintenance"), (True, "")]
        with pytest.raises(RlctlError) as caught:
            await client.drain("zz")
        assert caught.value.reason is Reason.STAGE_NOT_FOUND
    async with unreachable(fleet, "b"), await aio.connect(fleet.server.address) as client:
        assert "its load is unknown" in (await client.busy("b"))["b"]


async def test_a_stage_without_a_link_is_idle_from_the_end_of_its_serving_lease(make_fleet: Callable) -> None:
    """A restart of a stopped stage would otherwise wait for the whole drain timeout, although no request runs there."""
    async with (
        make_fleet(a=1, b=1, lease_s=2.0) as fleet,
        await aio.connect(fleet.server.address) as client,
        unreachable(fleet, "b"),
    ):
        assert fleet.stage("b").report.lease_held
        assert list(await client.busy("b")) == ["b"]
        after = await client.drain("b", timeout_s=10)
        assert [stage.enabled for stage in after.stages] == [True, False]
        assert not fleet.stage("b").report.lease_held
        plan = await begin(fleet)
        assert await client.busy("b") == {"b": "an update of actor is open"}
        await abort(fleet, plan)


async def test_a_stage_that_is_left_to_the_next_update_says_when_it_is_healed(make_fleet: Callable) -> None:
    async with make_fleet(a=1, graces=Graces(heal_s=1.5)) as fleet:
        plan = await begin(fleet)
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        began = time.time()
        await abort(fleet, plan)
        await eventually(lambda: fleet.stage("a").HasField("heal_time"))
        assert fleet.stage("a").state == common.STAGE_STATE_DIRTY
        due = fleet.stage("a").heal_time.ToNanoseconds() / 1e9
        assert began + 1.4 < due < time.time() + 1.6
        await fleet.until(lambda stages: stages[0].routable)
        assert time.time() > due - 0.1, "not before"
        assert not fleet.stage("a").HasField("heal_time")
        assert weights(fleet) == ["one"]


async def test_a_renewed_lease_keeps_the_update_open(fleet: InProcessFleet) -> None:
    plan = await begin(fleet, lease_ttl=duration(2))
    renewal = u.RenewLeaseRequest(update_id=plan.update_id, fencing_token=plan.fencing_token)
    for _ in range(3):
        await asyncio.sleep(0.8)
        await fleet.stub.RenewLease(renewal)
    assert fleet.server.coordinator.updates.is_open(plan.update_id)
    renewal.fencing_token += 1
    assert (await refusal(fleet.stub.RenewLease(renewal))).reason is Reason.UPDATE_FENCED


async def test_a_coordinator_that_was_stopped_reads_what_the_owner_said_meanwhile(fleet: InProcessFleet) -> None:
    plan = await begin(fleet, lease_ttl=duration(2))
    await join(fleet, plan)
    time.sleep(3.5)  # noqa: ASYNC251 (everything here is stopped, as by SIGSTOP)
    await fleet.stub.RenewLease(u.RenewLeaseRequest(update_id=plan.update_id, fencing_token=plan.fencing_token))
    await write(fleet, plan, "w1")
    assert (await commit(fleet, plan)).state == OPERATION_STATE_OK
    # It is no licence: the owner of the next one does not come back.
    plan = await begin(fleet, lease_ttl=duration(2), version="never")
    time.sleep(3.5)  # noqa: ASYNC251
    run = fleet.server.coordinator.operations.get(plan.update_id)
    async with asyncio.timeout(10):
        await run.ended.wait()
    assert run.operation.error.reason == "LEASE_EXPIRED"


async def test_only_the_owner_commits(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    request = u.CommitWeightUpdateRequest(update_id=plan.update_id, fencing_token=plan.fencing_token + 1)
    assert (await refusal(fleet.stub.CommitWeightUpdate(request))).reason is Reason.UPDATE_FENCED
    request = u.CommitWeightUpdateRequest(update_id="nobody's", fencing_token=1)
    assert (await refusal(fleet.stub.CommitWeightUpdate(request))).reason is Reason.UPDATE_NOT_FOUND


async def test_nothing_else_touches_the_model_while_an_update_is_open(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    for call in (
        fleet.stub.PauseGeneration(v.PauseGenerationRequest()),
        fleet.stub.UpdateWeightsFromDisk(v.UpdateWeightsFromDiskRequest(model_path="/x")),
        begin(fleet, "step-2"),
    ):
        error = await refusal(call)
        assert error.reason is Reason.UPDATE_IN_PROGRESS
        assert error.metadata["holder"] == plan.update_id
        assert "trainer is updating actor" in error.message
    assert (await fleet.stub.AbortRequests(v.AbortRequestsRequest(abort_all=True))).state == OPERATION_STATE_OK


async def test_an_empty_full_update_is_refused_at_commit(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    operation = await commit(fleet, plan)
    assert (operation.state, operation.error.reason) == (OPERATION_STATE_FAILED, "WEIGHTS_INCOMPLETE")
    assert all(fleet.stage(slot).routable for slot in "ab")


async def test_a_target_that_cannot_prepare_fails_the_update_and_the_others_resume(fleet: InProcessFleet) -> None:
    fault(fleet, 1, 2, "prepare_update", Reason.ENGINE_FAILED.error("cannot prepare"))
    plan = await begin(fleet)
    await join(fleet, plan)
    written = await write(fleet, plan, "w1")
    assert written.state == OPERATION_STATE_FAILED
    assert "cannot prepare" in written.error.message
    await abort(fleet, plan)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    assert weights(fleet) == ["one"] * 3


async def test_a_write_that_fails_on_one_rank_leaves_that_stage_dirty(fleet: InProcessFleet) -> None:
    failure = Reason.GROUP_FAILED.error("broken", outcome=OUTCOME_DIRTY)
    fault(fleet, 1, 2, "update_weights_from_distributed", failure)
    plan = await begin(fleet)
    await join(fleet, plan)
    written = await write(fleet, plan, "w1")
    assert [r.outcome for r in written.stage_results] == [OUTCOME_APPLIED, OUTCOME_DIRTY]
    await abort(fleet, plan)
    assert fleet.stage("b").state == common.STAGE_STATE_DIRTY
    assert not (await begin(fleet, "step-2")).groups[0].formed, "a group that failed is not used again"


async def test_from_disk_is_a_whole_update(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), weight_version="two")
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    assert operation.state == OPERATION_STATE_OK
    assert version_of(fleet) == ("two", 2)
    assert weights(fleet) == ["two"] * 3
    assert all(fleet.stage(slot).routable for slot in "ab")


async def test_from_disk_compares_with_the_expected_digest(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    path = checkpoint("two")
    wrong = v.UpdateWeightsFromDiskRequest(model_path=path, expected_digest=digest("three"))
    assert (await fleet.stub.UpdateWeightsFromDisk(wrong)).state == OPERATION_STATE_FAILED
    right = v.UpdateWeightsFromDiskRequest(model_path=path, expected_digest=digest("two"))
    assert (await fleet.stub.UpdateWeightsFromDisk(right)).state == OPERATION_STATE_OK


async def test_a_missing_checkpoint_changes_nothing(fleet: InProcessFleet) -> None:
    request = v.UpdateWeightsFromDiskRequest(model_path="/nowhere")
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    assert (operation.state, operation.error.reason) == (OPERATION_STATE_FAILED, "CHECKPOINT_NOT_FOUND")
    assert {r.outcome for r in operation.stage_results} == {OUTCOME_REJECTED}
    assert {r.state for r in operation.stage_results} == {common.STAGE_STATE_READY}
    assert all(fleet.stage(slot).routable for slot in "ab")
    assert version_of(fleet) == ("initial", 1)


async def test_what_was_paused_before_stays_paused(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    target = RequestHeader(target=Target(slots=["a"]))
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=target))
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
    assert (await fleet.stub.UpdateWeightsFromDisk(request)).state == OPERATION_STATE_OK
    assert fleet.stage("a").state == common.STAGE_STATE_PAUSED
    assert fleet.stage("b").routable


async def test_stay_paused_is_honoured(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    options = v.UpdateOptions(after=v.AFTER_UPDATE_STAY_PAUSED, pause=common.PAUSE_MODE_RETRACT)
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), options=options)
    assert (await fleet.stub.UpdateWeightsFromDisk(request)).state == OPERATION_STATE_OK
    assert {fleet.stage(slot).state for slot in "ab"} == {common.STAGE_STATE_PAUSED}
    assert (await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())).state == OPERATION_STATE_OK


async def test_a_stage_that_cannot_be_told_to_stay_paused_is_not_routed_to(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    """Its pause is still the update's, and would be lifted."""
    paused: list[str] = []

    async def refuse_second(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "pause_generation" and engine.config.tp_size == 1:
            paused.append(call.command_id)
            if len(paused) == 2:
                raise Reason.ENGINE_FAILED.error("not now")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse_second
    options = v.UpdateOptions(after=v.AFTER_UPDATE_STAY_PAUSED, pause=common.PAUSE_MODE_RETRACT)
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), options=options)
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    assert operation.state == OPERATION_STATE_PARTIAL
    assert [result.warning.message for result in operation.stage_results] == ["not now", ""]
    assert fleet.stage("a").quarantine.message == "not now"
    assert fleet.stage("b").state == common.STAGE_STATE_PAUSED


async def test_released_weights_refuse_an_update_before_anything_is_paused(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    await fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest(header=RequestHeader(target=Target(slots=["a"]))))
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
    error = await refusal(fleet.stub.UpdateWeightsFromDisk(request))
    assert error.reason is Reason.MEMORY_RELEASED
    assert error.message.startswith("a:")
    assert fleet.stage("b").routable


async def test_weights_may_be_updated_while_the_kv_cache_is_released(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    await fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest())
    await fleet.stub.ResumeMemory(v.ResumeMemoryRequest(tags=[common.MEMORY_TAG_WEIGHTS]))
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    assert operation.state == OPERATION_STATE_OK, operation
    assert {fleet.stage(slot).state for slot in "ab"} == {common.STAGE_STATE_ASLEEP}
    early = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert {r.error.reason for r in early.stage_results} == {"MEMORY_RELEASED"}
    await fleet.stub.ResumeMemory(v.ResumeMemoryRequest())
    assert (await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())).state == OPERATION_STATE_OK
    assert all(fleet.stage(slot).routable for slot in "ab")


async def test_begin_is_repeatable_and_validate_only_opens_nothing(fleet: InProcessFleet) -> None:
    trial = await begin(fleet, header=RequestHeader(validate_only=True))
    assert trial.version.sequence == 2
    assert not fleet.server.coordinator.roster.models["actor"].update_id
    mine = RequestHeader(request_id=new_uuid7())
    first = await begin(fleet, header=mine)
    again = await begin(fleet, header=mine)
    assert again == first
    assert first.version.sequence == 2


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"model": "zz"}, Reason.MODEL_NOT_FOUND, "model"),
        ({"options": v.UpdateOptions(quorum=3)}, Reason.FIELD_INVALID, "options.quorum"),
        (
            {"options": v.UpdateOptions(verify=common.VERIFICATION_LEVEL_PROBE)},
            Reason.FIELD_REQUIRED,
            "options.probe",
        ),
        ({"apply": v.APPLY_MODE_STAGED}, Reason.FIELD_REQUIRED, "options.pause"),
        (
            {
                "rollout": u.RolloutStrategy(max_unavailable=1),
                "options": v.UpdateOptions(verify=common.VERIFICATION_LEVEL_REPLICA),
            },
            Reason.VERIFICATION_UNREACHABLE,
            "options.verify",
        ),
        (
            {
                "apply": v.APPLY_MODE_STAGED,
                "rollout": u.RolloutStrategy(max_unavailable=1),
                "options": v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT, after=v.AFTER_UPDATE_STAY_PAUSED),
            },
            Reason.FIELD_CONFLICT,
            "options.after",
        ),
        ({"kind": v.UPDATE_KIND_ADAPTER}, Reason.FIELD_REQUIRED, "adapter"),
        ({"kind": v.UPDATE_KIND_DELTA}, Reason.FIELD_REQUIRED, "base.label"),
        ({"kind": v.UPDATE_KIND_DELTA, "base": V(label="x")}, Reason.BASE_MISMATCH, "base"),
        ({"kind": v.UPDATE_KIND_DELTA, "base": V(label="initial", sequence=2)}, Reason.BASE_MISMATCH, "base"),
        ({"path": u.DATA_PATH_IPC}, Reason.NOT_COLOCATED, "path"),
        ({"num_sources": 5000}, Reason.FIELD_INVALID, "num_sources"),
    ],
)
async def test_an_update_that_cannot_be_is_refused_at_begin(
    fleet: InProcessFleet, fields: dict, reason: Reason, field: str
) -> None:
    request = u.BeginWeightUpdateRequest(**({"model": "actor", "version": "v"} | fields))
    error = await refusal(fleet.stub.BeginWeightUpdate(request))
    assert (error.reason, error.field) == (reason, field)
    assert all(fleet.stage(slot).routable for slot in "ab")


async def test_who_begins_while_another_update_ends_is_told_whose_it_is(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    serve = Commit._serve

    async def begun_meanwhile(self: Commit, good: Sequence[Slot]) -> None:
        told.append(await refusal(begin(fleet, version="step-2", trainer=u.Trainer(name="second"))))
        await serve(self, good)

    monkeypatch.setattr(Commit, "_serve", begun_meanwhile)
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    assert (await commit(fleet, plan)).state == OPERATION_STATE_OK
    (error,) = told
    assert (error.reason, error.metadata["owner"]) == (Reason.UPDATE_IN_PROGRESS, "trainer")
    monkeypatch.undo()
    await begin(fleet, version="step-2")


async def test_an_older_trainer_is_fenced(fleet: InProcessFleet) -> None:
    newer = u.BeginWeightUpdateRequest(model="actor", version="v", trainer=u.Trainer(incarnation=5))
    plan = await fleet.stub.BeginWeightUpdate(newer)
    await abort(fleet, plan)
    older = u.BeginWeightUpdateRequest(model="actor", version="v", trainer=u.Trainer(incarnation=4))
    error = await refusal(fleet.stub.BeginWeightUpdate(older))
    assert (error.reason, error.field) == (Reason.TRAINER_FENCED, "trainer.incarnation")
    assert error.message == "incarnation 5 of the trainer has updated actor, this is incarnation 4"
    assert error.next_step == "Stop this trainer. If no newer trainer runs, pass incarnation=5 or a higher one."
    # It would wait in vain for an update of the newer one to end; and it ends nothing, though it cannot be.
    plan = await fleet.stub.BeginWeightUpdate(newer)
    assert (await refusal(fleet.stub.BeginWeightUpdate(older))).reason is Reason.TRAINER_FENCED
    newest = u.BeginWeightUpdateRequest(model="actor", version="v", trainer=u.Trainer(incarnation=6), num_sources=5000)
    assert (await refusal(fleet.stub.BeginWeightUpdate(newest))).field == "num_sources"
    assert fleet.server.coordinator.updates.is_open(plan.update_id)


async def test_what_is_read_from_disk_is_no_trainers_that_is_over(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    plan = await begin(fleet, trainer=u.Trainer(incarnation=5))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK
    from_disk = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), weight_version="two")
    assert (await fleet.stub.UpdateWeightsFromDisk(from_disk)).state == OPERATION_STATE_OK
    assert version_of(fleet) == ("two", 3)


async def test_active_requests_refuse_an_update_without_a_pause(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    running = FakeEngine.generate(fleet.stages["a"]._engine, fake_engine.rollout.GenerateRequest())
    await anext(running)
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    assert (operation.state, operation.error.reason) == (OPERATION_STATE_FAILED, "ACTIVE_REQUESTS")
    assert all(fleet.stage(slot).routable for slot in "ab")
    request.options.pause = common.PAUSE_MODE_RETRACT
    assert (await fleet.stub.UpdateWeightsFromDisk(request)).state == OPERATION_STATE_OK
    await running.aclose()


async def test_a_draft_model_that_nobody_has_is_refused_before_anything_is_paused(fleet: InProcessFleet) -> None:
    draft = v.UpdateOptions(selector=common.WEIGHT_SELECTOR_DRAFT, pause=common.PAUSE_MODE_RETRACT)
    refused = await refusal(begin(fleet, options=draft))
    assert (refused.reason, refused.field) == (Reason.UNSUPPORTED, "options.selector")
    from_disk = v.UpdateWeightsFromDiskRequest(model_path="/nowhere", options=draft)
    refused = await refusal(fleet.stub.UpdateWeightsFromDisk(from_disk))
    assert (refused.reason, refused.field) == (Reason.UNSUPPORTED, "options.selector")
    assert not any(fleet.stage(name).report.paused for name in "ab")


async def test_a_pause_that_a_stage_does_not_have_is_refused_before_anything_is_paused(fleet: InProcessFleet) -> None:
    modes = fleet.server.coordinator.roster.slots["b"].record.registration.capabilities.pause_modes
    modes[:] = [common.PAUSE_MODE_RETRACT, common.PAUSE_MODE_DRAIN]
    for options in (v.UpdateOptions(pause=common.PAUSE_MODE_IN_PLACE), v.UpdateOptions(abort_all_requests=True)):
        refused = await refusal(begin(fleet, options=options))
        assert (refused.reason, refused.field) == (Reason.UNSUPPORTED, "options.pause")
        assert refused.message.startswith("b has no pause mode ")
        assert refused.message.endswith("it has: retract, drain")
    assert not any(fleet.stage(name).report.paused for name in "ab")


async def test_nothing_is_done_to_an_open_update_on_trial(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    trial = RequestHeader(validate_only=True)
    owner = {"header": trial, "update_id": plan.update_id, "fencing_token": plan.fencing_token}
    for call in (
        fleet.stub.CommitWeightUpdate(u.CommitWeightUpdateRequest(**owner, expected_digest=digest("w1"))),
        fleet.stub.AbortWeightUpdate(u.AbortWeightUpdateRequest(**owner)),
        fleet.stub.RetryWeightUpdate(u.RetryWeightUpdateRequest(**owner, failed_attempt=1)),
    ):
        error = await refusal(call)
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "header.validate_only")
    assert version_of(fleet) == ("initial", 1)
    assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK


@pytest.mark.parametrize("outcome", [common.OUTCOME_UNKNOWN, common.OUTCOME_DIRTY])
async def test_an_update_whose_abort_is_not_known_to_have_been_heard_is_aborted_again(
    fleet: InProcessFleet, outcome: common.Outcome
) -> None:
    told: list[FakeEngine] = []

    async def deaf_once(engine: FakeEngine, method: str, _: Call) -> None:
        if method == "abort_update" and engine.config.tp_size == 1:
            told.append(engine)
            if len(told) == 1:
                raise Reason.RANK_SILENT.error("it is busy", outcome=outcome)

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = deaf_once
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "half")
    await abort(fleet, plan)
    assert fleet.stage("a").report.state != common.STAGE_STATE_READY
    await eventually(lambda: len(told) == 2 and not told[0]._update)
    await fleet.until(lambda stages: all(stage.state == common.STAGE_STATE_DIRTY for stage in stages))


async def test_a_commit_waits_for_what_is_still_being_taken_in(fleet: InProcessFleet) -> None:
    """Of a partial update that nobody digests, the answers to its writes are all that tells that one has failed."""
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT, verify=common.VERIFICATION_LEVEL_NONE)
    plan = await begin(fleet, kind=v.UPDATE_KIND_PARTIAL, options=options)
    await join(fleet, plan)
    await write(fleet, plan, "first")
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def fail(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "update_weights_from_distributed" and engine.config.tp_size == 1:
            begun.set()
            await may_end.wait()
            raise Reason.ENGINE_FAILED.error("a part is missing")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fail
    writing = asyncio.ensure_future(write(fleet, plan, "second"))
    await begun.wait()
    committing = asyncio.ensure_future(commit(fleet, plan))
    await eventually(fleet.server.coordinator.updates.get(plan.update_id).owner.decided.is_set)
    may_end.set()
    assert (await writing).state != OPERATION_STATE_OK
    operation = await committing
    assert operation.state not in (OPERATION_STATE_OK, OPERATION_STATE_PARTIAL), operation
    assert version_of(fleet) == ("initial", 1)


@pytest.mark.parametrize("released", [True, False])
async def test_what_may_hold_entries_of_the_old_weights_is_flushed(fleet: InProcessFleet, *, released: bool) -> None:
    """A stage whose release failed half-way counts as asleep, and its cache may be as it was."""
    flushed: list[int] = []

    async def fail(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "release_memory" and engine.config.tp_size == 1 and not released:
            raise Reason.ENGINE_FAILED.error("half-way", outcome=OUTCOME_DIRTY)
        if name == "flush_cache":
            flushed.append(engine.config.tp_size)

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fail
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    await fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_KV_CACHE]))
    await fleet.until(lambda stages: all(stage.state == common.STAGE_STATE_ASLEEP for stage in stages))
    for slot in fleet.server.coordinator.roster.slots.values():
        slot.record.ClearField("quarantine")  # the disk was full, and another coordinator has taken over
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "new")
    assert (await commit(fleet, plan, digest("new"))).state == OPERATION_STATE_OK
    assert flushed == ([] if released else [1])


async def test_a_begin_that_is_refused_ends_no_older_trainers_update(fleet: InProcessFleet) -> None:
    plan = await begin(fleet, trainer=u.Trainer(name="one", incarnation=1))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    second = begin(fleet, trainer=u.Trainer(name="two", incarnation=2), options=v.UpdateOptions(quorum=99))
    assert (await refusal(second)).field == "options.quorum"
    assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK


async def test_what_reaches_no_target_is_refused_before_anything_is_paused(fleet: InProcessFleet) -> None:
    plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT))
    segment = v.TensorSegment(node="n", device="cpu", size=1, generation=1, shared_memory="x")
    segment.lease.seconds = 5
    segment.tensors.add(name="w1")
    header = RequestHeader(fence=common.Fence(update_id=plan.update_id))
    request = v.UpdateWeightsFromTensorRequest(header=header, segments=[segment])
    assert (await refusal(fleet.stub.UpdateWeightsFromTensor(request))).reason is Reason.NO_TARGETS
    assert all(fleet.stage(slot).routable for slot in "ab")
