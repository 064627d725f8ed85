"""Updates that roll in place: a pass of the sources for each batch, and from the first batch on no way back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from journal_faults import MEANWHILE_S, at_write, full_disk
from updating import (
    abort,
    begin,
    commit,
    digest,
    fault,
    join,
    refusal,
    restart,
    retry,
    unreachable,
    version_of,
    weights,
    write,
)
from waiting import eventually

from rlctl.command_stream import commander
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet import stage_links
from rlctl.engine import Call
from rlctl.ports import Put
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    STAGE_STATE_DIRTY,
    STAGE_STATE_READY,
    STAGE_STATE_STALE,
)
from rlctl.v1.journal_pb2 import UpdateRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, OPERATION_STATE_PARTIAL, Operation

ONE = u.RolloutStrategy(max_unavailable=1)
RETRACT = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)


@pytest.fixture
async def three(make_fleet: Callable) -> AsyncIterator[InProcessFleet]:
    """Stages a, b and c; b has two ranks. Nothing heals by itself."""
    async with make_fleet(a=1, b=2, c=1, heal=False) as fleet:
        yield fleet


async def commit_batch(
    fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse, expected: str = "", batch: int = 0
) -> u.CommitBatchResponse:
    return await fleet.stub.CommitBatch(
        u.CommitBatchRequest(
            update_id=plan.update_id,
            fencing_token=plan.fencing_token,
            batch=batch or plan.batch.number,
            expected_digest=expected,
        )
    )


async def send(fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse, text: str = "w1") -> Operation:
    """One pass of the source."""
    await join(fleet, plan)
    return await write(fleet, plan, text)


async def first_batch(fleet: InProcessFleet, text: str = "w1", **fields: object) -> u.BeginWeightUpdateResponse:
    """Begin, and bring the first batch to the version; the plan of the second."""
    plan = await begin(fleet, **{"rollout": ONE, "options": RETRACT} | fields)
    await send(fleet, plan, text)
    return (await commit_batch(fleet, plan, digest(text))).next


def admitted(fleet: InProcessFleet) -> list[str]:
    return [version.label for version in fleet.server.coordinator.roster.models["actor"].admitted]


def states(fleet: InProcessFleet) -> list[int]:
    return [fleet.stage(slot).state for slot in "abc"]


def routable(fleet: InProcessFleet) -> list[bool]:
    return [fleet.stage(slot).routable for slot in "abc"]


def outcomes(operation: Operation) -> dict[str, int]:
    return {result.slot: result.outcome for result in operation.stage_results}


async def test_every_batch_is_written_verified_and_admitted_before_the_next_hears_of_it(three: InProcessFleet) -> None:
    plan = await begin(three, rollout=ONE, options=RETRACT)
    held = [["w1", "one", "one"], ["w1", "w1", "one"]]
    for number, slot in enumerate("ab", 1):
        assert (plan.batch.number, list(plan.batch.slots), plan.batch.last) == (number, [slot], False)
        assert [target.slot for target in plan.targets] == ["a", "b", "c"]
        assert [member.slot for member in plan.groups[0].members] == [slot]
        assert (await send(three, plan)).state == OPERATION_STATE_OK
        assert [three.stage(other).routable for other in "abc" if other != slot] == [True, True]
        answer = await commit_batch(three, plan, digest("w1"))
        assert routable(three) == [True] * 3
        assert [three.stages[other]._engine.weights for other in "abc"] == held[number - 1]
        assert admitted(three) == ["initial", "step-1"]
        assert version_of(three) == ("step-1", 2)
        repeated = await commit_batch(three, plan, digest("w1"))
        assert repeated.next == answer.next
        plan = answer.next
    assert (plan.batch.last, list(plan.batch.slots), plan.batch.published) == (True, ["c"], True)
    await send(three, plan)
    operation = await commit(three, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_OK, operation
    assert {r.verified for r in operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    assert admitted(three) == ["step-1"]
    assert weights(three) == ["w1"] * 4
    assert routable(three) == [True] * 3
    assert operation.model_digest == digest("w1")
    # What follows is an update like any other.
    plan = await begin(three, "step-2", options=RETRACT)
    await send(three, plan, "w2")
    assert (await commit(three, plan, digest("w2"))).state == OPERATION_STATE_OK


async def test_a_batch_is_as_large_as_allowed(three: InProcessFleet) -> None:
    plan = await first_batch(three, rollout=u.RolloutStrategy(max_unavailable=2))
    assert (list(plan.batch.slots), plan.batch.last) == (["c"], True)
    await send(three, plan)
    assert (await commit(three, plan, digest("w1"))).state == OPERATION_STATE_OK
    assert weights(three) == ["w1"] * 4


async def test_a_first_batch_that_is_wrong_publishes_nothing(three: InProcessFleet) -> None:
    plan = await begin(three, rollout=ONE, options=RETRACT)
    await send(three, plan, "other")
    ended = (await commit_batch(three, plan, digest("w1"))).ended
    assert ended.state == OPERATION_STATE_FAILED
    assert outcomes(ended) == {"a": OUTCOME_DIRTY, "b": OUTCOME_REJECTED, "c": OUTCOME_REJECTED}
    assert version_of(three) == ("initial", 1)
    assert states(three) == [STAGE_STATE_DIRTY, STAGE_STATE_READY, STAGE_STATE_READY]
    assert routable(three) == [False, True, True]


async def test_a_second_batch_that_is_wrong_ends_it_with_the_rest_stale(three: InProcessFleet) -> None:
    plan = await first_batch(three)
    await send(three, plan, "other")
    ended = (await commit_batch(three, plan, digest("w1"))).ended
    assert ended.state == OPERATION_STATE_PARTIAL
    assert ended.weight_version.label == "step-1"
    assert outcomes(ended) == {"a": OUTCOME_APPLIED, "b": OUTCOME_DIRTY, "c": OUTCOME_REJECTED}
    await eventually(lambda: states(three) == [STAGE_STATE_READY, STAGE_STATE_DIRTY, STAGE_STATE_STALE])
    assert routable(three) == [True, False, False]
    assert admitted(three) == ["step-1"]
    assert not any(three.stage(slot).report.update_id for slot in "abc")


async def test_a_batch_does_not_serve_the_published_version_before_it_is_verified(three: InProcessFleet) -> None:
    plan = await first_batch(three)
    seen = []

    async def look(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "check_weights" and engine is three.stages["b"]._engine:
            facts = three.stages["b"]._stage.facts
            seen.append((facts.state, list(facts.admitted), three.stage("b").quarantine.reason))

    fake_engine.FAULTS[three.specs[0].model_path, 0] = look
    await send(three, plan)
    last = (await commit_batch(three, plan, digest("w1"))).next
    assert seen == [(common.STAGE_STATE_UPDATING, [], "WEIGHTS_STALE")]
    assert three.stage("b").routable
    assert not three.stage("b").quarantine.reason
    await abort(three, last)


@pytest.mark.parametrize("end", ["abort", "lease", "deadline", "journal"])
async def test_between_two_batches_it_can_only_end_partial(three: InProcessFleet, end: str) -> None:
    # Longer than the first batch takes on a busy machine.
    fields = {"lease": {"lease_ttl": duration(1.5)}, "deadline": {"header": common.RequestHeader(timeout=duration(2))}}
    plan = await first_batch(three, **fields.get(end, {}))
    await join(three, plan)
    if end == "journal":
        journal = three.server.coordinator._journal
        write_through = journal.write

        async def refuse(_: object) -> None:
            journal.write = write_through  # type: ignore[method-assign]
            raise Reason.JOURNAL_FAILED.error("no space is left")

        await write(three, plan, "w1")
        journal.write = refuse  # type: ignore[method-assign]
        operation = (await commit_batch(three, plan, digest("w1"))).ended
    elif end == "abort":
        await write(three, plan, "w1")
        operation = await abort(three, plan)
    else:
        run = three.server.coordinator.operations.get(plan.update_id)
        async with asyncio.timeout(10):
            await run.ended.wait()
        operation = run.operation
    assert operation.state == OPERATION_STATE_PARTIAL, operation
    assert version_of(three) == ("step-1", 2)
    written = end in ("abort", "journal")
    assert states(three)[0] == STAGE_STATE_READY
    if end != "journal":
        await eventually(lambda: states(three)[1] == (STAGE_STATE_DIRTY if written else STAGE_STATE_STALE))
    assert routable(three)[2] is False
    assert admitted(three) == ["step-1"]
    assert (await refusal(write(three, plan, "w1"))).reason is Reason.UPDATE_NOT_FOUND


async def test_targets_that_could_not_be_told_of_the_end_say_what_was_in_the_way(three: InProcessFleet) -> None:
    plan = await first_batch(three)
    await join(three, plan)
    await write(three, plan, "w1")
    run = three.server.coordinator.operations.get(plan.update_id)
    journal = three.server.coordinator._journal
    write_through = journal.write

    async def refuse(_: object) -> None:
        raise Reason.JOURNAL_FAILED.error("no space is left")

    async def fail(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "abort_update":  # to be quarantined for that, which the journal does not take either
            raise Reason.ENGINE_FAILED.error("out of memory", outcome=OUTCOME_DIRTY)

    fake_engine.FAULTS[three.specs[1].model_path, 0] = fail
    journal.write = refuse  # type: ignore[method-assign]
    try:
        await commit_batch(three, plan, digest("w1"))
        async with asyncio.timeout(10):
            await run.ended.wait()
        # Over the link that grants come by: whatever was granted until now has been taken in.
        await three.stub.GetModelInfo(v.GetModelInfoRequest())
        served = {slot: [version.label for version in three.stages[slot]._stage.facts.admitted] for slot in "ac"}
        assert served == {"a": ["step-1"], "c": ["step-1"]}
    finally:
        journal.write = write_through  # type: ignore[method-assign]
    results = {result.slot: result for result in run.operation.stage_results}
    assert [results[slot].outcome == OUTCOME_APPLIED for slot in "abc"] == [True, False, False]
    assert [results[slot].error.reason for slot in "bc"] == ["JOURNAL_FAILED"] * 2
    assert run.operation.state == OPERATION_STATE_PARTIAL


async def test_the_coordinator_that_leaves_while_a_batch_is_committed_begins_no_other(three: InProcessFleet) -> None:
    plan = await begin(three, rollout=ONE, options=RETRACT)
    await send(three, plan)

    async def leave(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "commit_update":
            three.server.coordinator.updates._open[plan.update_id].owner.decide(
                verdict=Reason.CANCELLED.error("the coordinator is shutting down")
            )

    fake_engine.FAULTS[three.specs[0].model_path, 0] = leave
    await commit_batch(three, plan, digest("w1"))
    run = three.server.coordinator.operations.get(plan.update_id)
    async with asyncio.timeout(10):
        await run.ended.wait()
    assert run.operation.state == OPERATION_STATE_PARTIAL
    assert routable(three) == [True, False, False]
    await eventually(lambda: states(three) == [STAGE_STATE_READY, STAGE_STATE_STALE, STAGE_STATE_STALE])


async def test_sources_that_changed_their_weights_between_batches_are_told(three: InProcessFleet) -> None:
    plan = await first_batch(three)
    await send(three, plan, "w2")
    error = await refusal(commit_batch(three, plan, digest("w2")))
    assert (error.reason, error.field) == (Reason.DIGEST_MISMATCH, "expected_digest")
    assert (await abort(three, plan)).state == OPERATION_STATE_PARTIAL
    assert routable(three) == [True, False, False]
    await eventually(lambda: states(three) == [STAGE_STATE_READY, STAGE_STATE_DIRTY, STAGE_STATE_STALE])


async def test_without_the_sources_digest_later_batches_must_hold_what_the_first_one_does(
    three: InProcessFleet,
) -> None:
    plan = await begin(three, rollout=ONE, options=RETRACT)
    await send(three, plan)
    plan = (await commit_batch(three, plan)).next
    await send(three, plan, "other")
    ended = (await commit_batch(three, plan)).ended
    assert ended.state == OPERATION_STATE_PARTIAL
    assert outcomes(ended)["b"] == OUTCOME_DIRTY


async def test_batches_are_committed_in_their_order_and_by_their_call(three: InProcessFleet) -> None:
    plan = await begin(three, rollout=ONE, options=RETRACT)
    await send(three, plan)
    assert (await refusal(commit(three, plan, digest("w1")))).reason is Reason.ILLEGAL_STATE
    assert (await refusal(commit_batch(three, plan, digest("w1"), batch=2))).field == "batch"
    plan = (await commit_batch(three, plan, digest("w1"))).next
    await send(three, plan)
    plan = (await commit_batch(three, plan, digest("w1"))).next
    await send(three, plan)
    assert (await refusal(commit_batch(three, plan, digest("w1")))).reason is Reason.ILLEGAL_STATE
    assert (await commit(three, plan, digest("w1"))).state == OPERATION_STATE_OK
    plan = await begin(three, "step-2", options=RETRACT)
    assert (await refusal(commit_batch(three, plan, batch=1))).field == "batch"


async def test_a_lost_batch_is_left_out_by_another_attempt(three: InProcessFleet) -> None:
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT, quorum=2)
    plan = await first_batch(three, options=options, retries=1)
    await restart(three, "b")
    await three.until(lambda stages: len(stages) == 3)
    assert (await send(three, plan)).state != OPERATION_STATE_OK
    plan = await retry(three, plan)
    assert (list(plan.lost), plan.batch.number, list(plan.batch.slots), plan.batch.last) == (["b"], 3, ["c"], True)
    await send(three, plan)
    operation = await commit(three, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_PARTIAL
    assert [three.stages[slot]._engine.weights for slot in "ac"] == ["w1", "w1"]
    assert routable(three) == [True, False, True]


async def test_where_the_last_batch_is_lost_there_is_no_other_attempt(three: InProcessFleet) -> None:
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT, quorum=2)
    plan = await first_batch(three, options=options, retries=1)
    await send(three, plan)
    plan = (await commit_batch(three, plan, digest("w1"))).next
    assert (list(plan.batch.slots), plan.batch.last) == (["c"], True)
    await restart(three, "c")
    await three.until(lambda stages: len(stages) == 3)
    assert (await refusal(retry(three, plan))).reason is Reason.NO_TARGETS
    assert (await abort(three, plan)).state == OPERATION_STATE_PARTIAL
    assert version_of(three) == ("step-1", 2)
    assert routable(three) == [True, True, False]


async def test_what_a_quorum_allows_to_fail_does_not_stop_the_rolling(three: InProcessFleet) -> None:
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT, quorum=2)
    plan = await begin(three, rollout=ONE, options=options)
    await send(three, plan, "other")
    answer = await commit_batch(three, plan, digest("w1"))
    assert version_of(three) == ("initial", 1)
    for _ in range(2):
        plan = answer.next
        await send(three, plan)
        if not plan.batch.last:
            answer = await commit_batch(three, plan, digest("w1"))
    operation = await commit(three, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_PARTIAL
    assert outcomes(operation) == {"a": OUTCOME_DIRTY, "b": OUTCOME_APPLIED, "c": OUTCOME_APPLIED}
    assert routable(three) == [False, True, True]


async def test_from_disk_in_place(three: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    seen = []

    async def look(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "update_weights_from_disk":
            seen.append((routable(three), admitted(three)))

    fake_engine.FAULTS[three.specs[0].model_path, 0] = look
    request = v.UpdateWeightsFromDiskRequest(
        model_path=checkpoint("two"), weight_version="two", options=RETRACT, max_unavailable=1
    )
    operation = await three.stub.UpdateWeightsFromDisk(request)
    assert operation.state == OPERATION_STATE_OK, operation
    assert weights(three) == ["two"] * 4
    assert [available for available, _ in seen] == [[False, True, True], [True, False, True], [True, True, False]]
    assert [versions for _, versions in seen] == [["initial"], ["initial", "two"], ["initial", "two"]]
    assert routable(three) == [True] * 3


@pytest.mark.parametrize("at", ["inspect_checkpoint", "prepare_update", "commit_update"])
async def test_from_disk_in_place_nothing_more_is_read_once_it_is_aborted(
    three: InProcessFleet, checkpoint: Callable[[str], str], at: str
) -> None:
    """What is written into is DIRTY; the batches after the first are not even paused."""
    told: list[tuple[int, str]] = []

    async def override(engine: FakeEngine, name: str, call: Call) -> None:
        told.append((engine.config.tp_size, name))
        if name == at and three.server.coordinator.updates._open:
            (update_id,) = three.server.coordinator.updates._open
            await three.server.coordinator.updates.abort(update_id, 0, "enough")

    fake_engine.FAULTS[three.specs[0].model_path, 0] = override
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), options=RETRACT, max_unavailable=1)
    operation = await three.stub.UpdateWeightsFromDisk(request)
    touched = {slot: outcome for slot, outcome in outcomes(operation).items() if outcome != OUTCOME_REJECTED}
    assert touched == ({"a": OUTCOME_APPLIED} if at == "commit_update" else {})
    assert {name for ranks, name in told if ranks == 2} <= {"inspect_checkpoint", "abort_update"}


@pytest.mark.parametrize("quorum", [0, 2])
async def test_from_disk_in_place_a_batch_that_cannot_read(
    three: InProcessFleet, checkpoint: Callable[[str], str], quorum: int
) -> None:
    fault(three, 1, 2, "update_weights_from_disk", Reason.ENGINE_FAILED.error("truncated", outcome=OUTCOME_DIRTY))
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT, quorum=quorum)
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), options=options, max_unavailable=1)
    operation = await three.stub.UpdateWeightsFromDisk(request)
    assert operation.state == OPERATION_STATE_PARTIAL, operation
    assert outcomes(operation)["a"] == OUTCOME_APPLIED
    assert outcomes(operation)["b"] == OUTCOME_DIRTY
    assert outcomes(operation)["c"] == (OUTCOME_APPLIED if quorum else OUTCOME_REJECTED)
    assert routable(three) == [True, False, bool(quorum)]


async def test_what_has_read_its_batch_has_not_confirmed_it(
    three: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    """What became of its commit is lost with the disk, and that it has read the weights is no answer to that."""
    async with contextlib.AsyncExitStack() as filled:

        async def fill(engine: FakeEngine, name: str, call: Call) -> None:
            if name == "commit_update" and engine.config.tp_size == 2:
                fake_engine.FAULTS.clear()
                await filled.enter_async_context(full_disk(three))
                raise Reason.ENGINE_FAILED.error("it cannot finish", outcome=OUTCOME_DIRTY)

        fake_engine.FAULTS[three.specs[0].model_path, 0] = fill
        request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), options=RETRACT, max_unavailable=1)
        operation = await three.stub.UpdateWeightsFromDisk(request)
    assert operation.state == OPERATION_STATE_PARTIAL
    assert outcomes(operation)["a"] == OUTCOME_APPLIED
    assert OUTCOME_APPLIED not in (outcomes(operation)["b"], outcomes(operation)["c"])


async def test_a_stage_that_cannot_be_reached_ends_the_rolling(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_links, "DRIFT_S", 0.1)
    monkeypatch.setattr(commander, "PING_EVERY_S", 0.02)  # leases run from the pongs
    async with make_fleet(a=1, b=1, c=1, lease_s=0.3) as three:
        plan = await first_batch(three)
        async with unreachable(three, "b"):
            assert (await send(three, plan)).state != OPERATION_STATE_OK
            operation = await abort(three, plan)
    assert operation.state == OPERATION_STATE_PARTIAL
    assert outcomes(operation)["a"] == OUTCOME_APPLIED
    assert outcomes(operation)["c"] == OUTCOME_REJECTED


def _opens(number: int) -> Callable[[Put], bool]:
    """Whether it is the record of an update whose batch of this number is the next one."""
    return lambda put: put.kind == "update" and UpdateRecord.FromString(put.body).plan.batch.number == number


async def test_a_repeat_is_not_told_of_a_batch_that_is_not_open_yet(three: InProcessFleet) -> None:
    """What it did with it would be refused, or forgotten."""
    plan = await begin(three, rollout=ONE, options=RETRACT)
    await send(three, plan)
    repeats: list[asyncio.Task[u.CommitBatchResponse]] = []

    async def repeat() -> None:
        repeats.append(asyncio.ensure_future(commit_batch(three, plan, digest("w1"))))
        await asyncio.wait(repeats, timeout=MEANWHILE_S)
        assert not repeats[0].done()

    async with at_write(three, _opens(2), before=repeat):
        answer = await commit_batch(three, plan, digest("w1"))
    assert (await repeats[0]).next == answer.next
    assert answer.next.groups[0].group_name != plan.groups[0].group_name
    assert (await send(three, answer.next)).state == OPERATION_STATE_OK
    last = (await commit_batch(three, answer.next, digest("w1"))).next
    assert last.batch.number == 3
    await abort(three, last)


async def test_a_defect_after_the_first_batch_leaves_nothing_of_the_version_before_in_service(
    three: InProcessFleet,
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    plan = await begin(three, rollout=ONE, options=RETRACT)
    await send(three, plan)
    async with at_write(three, _opens(2), before=fail):
        ended = (await commit_batch(three, plan, digest("w1"))).ended
    assert ended.state == OPERATION_STATE_PARTIAL
    assert outcomes(ended) == {"a": OUTCOME_APPLIED, "b": OUTCOME_REJECTED, "c": OUTCOME_REJECTED}
    assert "ZeroDivisionError" in ended.stage_results[1].error.message
    assert admitted(three) == ["step-1"]
    await eventually(lambda: states(three) == [STAGE_STATE_READY, STAGE_STATE_STALE, STAGE_STATE_STALE])


async def test_who_waits_for_its_batch_does_not_leave(three: InProcessFleet) -> None:
    plan = await begin(three, rollout=ONE)
    for target in plan.targets:
        error = await refusal(three.stub.DeregisterStage(rpc.DeregisterStageRequest(slot=target.slot)))
        assert error.reason is Reason.UPDATE_IN_PROGRESS
