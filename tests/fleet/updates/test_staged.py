"""Staged and rolling updates: what serves is touched by nothing but the swap, and batch by batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
from updating import abort, begin, commit, digest, join, refusal, version_of, weights, write
from waiting import eventually

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.fingerprints import fingerprints
from rlctl.engine import Call
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    STAGE_STATE_DIRTY,
    STAGE_STATE_PAUSED,
    STAGE_STATE_READY,
    STAGE_STATE_STALE,
)
from rlctl.v1.journal_pb2 import SlotRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, OPERATION_STATE_PARTIAL, Operation

RETRACT = common.PAUSE_MODE_RETRACT
Hook = Callable[[FakeEngine, str, Call], Awaitable[None]]


@pytest.fixture
async def three(make_fleet: Callable) -> AsyncIterator[InProcessFleet]:
    """Stages a, b and c; b has two ranks. Nothing heals by itself."""
    async with make_fleet(a=1, b=2, c=1, heal=False) as fleet:
        yield fleet


@contextmanager
def hooked(fleet: InProcessFleet, slot: str, method: str, hook: Hook, rank: int = 0) -> Iterator[None]:
    """Whenever a rank of this stage starts with the method, the hook runs first."""
    worker = fleet.stages[slot] if rank == 0 else fleet.workers[slot, rank]._follower
    path = fleet.specs[0].model_path

    async def fault(engine: FakeEngine, name: str, call: Call) -> None:
        if engine is worker._engine and name == method:
            await hook(engine, name, call)

    fake_engine.FAULTS[path, rank] = fault
    yield
    del fake_engine.FAULTS[path, rank]


def failing(error: RlctlError) -> Hook:
    async def fail(*_: object) -> None:
        raise error

    return fail


async def stage_weights(fleet: InProcessFleet, *names: str, **fields: object) -> u.BeginWeightUpdateResponse:
    """Begin a staged update and fill the shadow copies."""
    options = v.UpdateOptions(pause=RETRACT, quorum=fields.pop("quorum", 0))  # type: ignore[arg-type]
    plan = await begin(fleet, apply=v.APPLY_MODE_STAGED, options=options, **fields)
    await join(fleet, plan)
    await write(fleet, plan, *names)
    return plan


def held(fleet: InProcessFleet) -> dict[str, str]:
    """What the engine of every stage's rank 0 holds."""
    return {slot: stage._engine.weights for slot, stage in sorted(fleet.stages.items())}


def states(fleet: InProcessFleet) -> dict[str, int]:
    return {slot: fleet.stage(slot).state for slot in sorted(fleet.stages)}


def outcomes(operation: Operation) -> dict[str, int]:
    return {result.slot: result.outcome for result in operation.stage_results}


async def one_token(fleet: InProcessFleet, slot: str) -> rollout.GenerateResponse:
    async with aclosing(fleet.stages[slot]._engine.generate(rollout.GenerateRequest())) as messages:
        return await anext(messages)


async def test_stages_serve_the_old_version_until_the_swap(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1")
    for slot in "abc":
        seen = three.stage(slot)
        assert (seen.state, seen.routable, seen.staging_update_id) == (STAGE_STATE_READY, True, plan.update_id)
    assert weights(three) == ["one"] * 4
    assert (await one_token(three, "a")).samples[0].output_ids
    operation = await commit(three, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_OK, operation.error
    assert weights(three) == ["w1"] * 4
    assert version_of(three) == ("step-1", 2)
    assert operation.model_digest == digest("w1")
    assert {r.verified for r in operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    assert {r.evidence for s in operation.stage_results for r in s.rank_results} == {common.EVIDENCE_VERIFIED}
    for slot in "abc":
        assert three.stage(slot).routable
        assert three.stage(slot).report.model_digest == digest("w1")
        assert not three.stage(slot).staging_update_id


async def test_nothing_is_paused_before_every_copy_is_sealed_and_verified(three: InProcessFleet) -> None:
    order: list[tuple[str, FakeEngine]] = []

    async def note(engine: FakeEngine, name: str, _: Call) -> None:
        order.append((name, engine))

    plan = await stage_weights(three, "w1")
    with hooked(three, "a", "seal_update", note):
        path = three.specs[0].model_path
        fake_engine.FAULTS[path, 0] = note
        assert (await commit(three, plan)).state == OPERATION_STATE_OK
    at_once = ["seal_update", "check_weights", "pause_generation", "swap", "continue_generation"]
    swap = ["commit_update", "flush_cache"]  # in this order at each, and no stage waits for another between them
    names = ["swap" if name in swap else name for name, _ in order]
    assert [name for name in names if name in at_once] == sorted([*at_once, "swap"] * 3, key=at_once.index)
    for engine in {id(engine) for _, engine in order}:
        assert [name for name, at in order if id(at) == engine and name in swap] == swap


async def test_what_runs_is_treated_as_the_pause_says(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1")
    running = FakeEngine.generate(three.stages["a"]._engine, rollout.GenerateRequest())
    await anext(running)
    assert (await commit(three, plan)).state == OPERATION_STATE_OK
    assert (await anext(running)).samples[0].output_ids
    await running.aclose()


@pytest.mark.parametrize("swaps", [False, True])
async def test_an_abort_at_a_stage_that_loses_a_rank_is_unknown(three: InProcessFleet, swaps: bool) -> None:
    """All ranks carry out the abort, and a rank is lost before the last answer. Rank 0 may have swapped before."""
    follower = three.workers["b", 1]
    lost: list[asyncio.Task[None]] = []

    async def lose_rank_1() -> None:
        await eventually(lambda: not follower._follower._engine._update)
        await asyncio.sleep(0.1)  # its answer arrives
        await follower.stop()

    async def lose(engine: FakeEngine, *_: object) -> None:
        engine._delay = 1.0
        lost.append(asyncio.create_task(lose_rank_1()))

    fail = failing(Reason.ENGINE_FAILED.error("no memory", outcome=OUTCOME_REJECTED))
    plan = await stage_weights(three, "w1")
    with hooked(three, "b", "abort_update", lose), hooked(three, "b", "commit_update", fail, rank=1):
        del three.workers["b", 1]
        operation = await commit(three, plan) if swaps else await abort(three, plan)
        await asyncio.gather(*lost)
    assert lost
    failed = next(result for result in operation.stage_results if result.slot == "b")
    assert failed.state == common.STAGE_STATE_FAILED
    assert failed.outcome == OUTCOME_UNKNOWN, "a stage without a rank shows nothing of its weights"


@pytest.mark.parametrize("method", ["prepare_update", "update_weights_from_distributed", "seal_update"])
@pytest.mark.parametrize("outcome", [OUTCOME_REJECTED, OUTCOME_UNKNOWN])
async def test_one_rank_that_fails_before_the_swap_and_nobody_swaps(
    three: InProcessFleet, method: str, outcome: int
) -> None:
    with hooked(three, "b", method, failing(Reason.ENGINE_FAILED.error("no memory", outcome=outcome)), rank=1):
        plan = await stage_weights(three, "w1")
        operation = await commit(three, plan) if method == "seal_update" else await abort(three, plan)
    assert operation.state == OPERATION_STATE_FAILED, operation
    assert set(outcomes(operation).values()) == {OUTCOME_REJECTED}, "an abort that is confirmed leaves nothing unknown"
    assert weights(three) == ["one"] * 4
    assert set(states(three).values()) == {STAGE_STATE_READY}
    assert all(three.stage(slot).routable for slot in "abc"), [three.stage(slot).not_routable for slot in "abc"]
    again = await stage_weights(three, "w2", version="step-2")
    assert (await commit(three, again, digest("w2"))).state == OPERATION_STATE_OK


async def test_another_attempt_starts_with_empty_copies_and_nothing_was_quarantined(three: InProcessFleet) -> None:
    options = v.UpdateOptions(pause=RETRACT)
    plan = await begin(three, apply=v.APPLY_MODE_STAGED, options=options, retries=1)
    await join(three, plan)
    broken = Reason.GROUP_FAILED.error("broken", outcome=OUTCOME_UNKNOWN)
    with hooked(three, "b", "update_weights_from_distributed", failing(broken)):
        assert (await write(three, plan, "w1")).state != OPERATION_STATE_OK
    assert all(three.stage(slot).routable for slot in "abc")
    three.server.coordinator.updates._open[plan.update_id].received.clear()  # all ranks are there
    again = await three.stub.RetryWeightUpdate(
        u.RetryWeightUpdateRequest(update_id=plan.update_id, fencing_token=plan.fencing_token, failed_attempt=1)
    )
    assert (again.attempt, list(again.lost)) == (2, [])
    await join(three, again)
    await write(three, again, "w2")
    assert (await commit(three, again, digest("w2"))).state == OPERATION_STATE_OK
    assert weights(three) == ["w2"] * 4


async def test_a_copy_with_another_digest_is_never_swapped(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1")
    three.workers["b", 1]._follower._engine._shadow = "off by a byte"
    operation = await commit(three, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_FAILED
    by_slot = {result.slot: result for result in operation.stage_results}
    assert (by_slot["b"].outcome, by_slot["b"].error.reason) == (OUTCOME_REJECTED, "DIGEST_MISMATCH")
    assert weights(three) == ["one"] * 4
    assert all(three.stage(slot).routable for slot in "abc")


async def test_what_differs_in_a_copy_is_named_and_nothing_is_spoilt(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1")

    async def another(engine: FakeEngine, *_: object) -> None:
        engine._shadow = "another"

    with hooked(three, "b", "seal_update", another, rank=1), hooked(three, "b", "seal_update", another):
        operation = await commit(three, plan, digest("w1"), fingerprints=fingerprints({"weights": digest("w1")}))
    (result,) = [result for result in operation.stage_results if result.slot == "b"]
    assert (result.outcome, result.error.reason) == (OUTCOME_REJECTED, "DIGEST_MISMATCH")
    assert (result.error.metadata["tensor"], result.error.metadata["ranks"]) == ("weights", "0,1")
    assert [rank.check.difference.part.differs for rank in result.rank_results] == [True, True]
    assert set(states(three).values()) == {STAGE_STATE_READY}


async def test_level_received_compares_what_came_into_the_copy(three: InProcessFleet) -> None:
    options = v.UpdateOptions(pause=RETRACT, verify=common.VERIFICATION_LEVEL_RECEIVED)

    async def stage(version: str) -> u.BeginWeightUpdateResponse:
        plan = await begin(three, version, apply=v.APPLY_MODE_STAGED, options=options)
        await join(three, plan)
        await write(three, plan, "w1")
        return plan

    async def another(engine: FakeEngine, *_: object) -> None:
        engine.received_names = ["another"]

    with hooked(three, "c", "seal_update", another):
        operation = await commit(three, await stage("wrong"), digest("w1"))
    (result,) = [result for result in operation.stage_results if result.slot == "c"]
    assert (result.outcome, result.error.reason) == (OUTCOME_REJECTED, "DIGEST_MISMATCH")
    assert weights(three) == ["one"] * 4
    operation = await commit(three, await stage("right"), digest("w1"))
    assert operation.state == OPERATION_STATE_OK
    assert {result.verified for result in operation.stage_results} == {common.VERIFICATION_LEVEL_RECEIVED}


@pytest.mark.parametrize("verify", [common.VERIFICATION_LEVEL_PROBE, common.VERIFICATION_LEVEL_REPLICA])
@pytest.mark.parametrize("right", [True, False])
async def test_a_probe_is_computed_after_the_swap_and_before_anything_is_served(
    three: InProcessFleet, right: bool, verify: common.VerificationLevel.ValueType
) -> None:
    tokens = [1, 2, 3]
    expected = fake_engine.logprobs("w1" if right else "other", tokens)
    probe = v.Probe(prompts=[v.ProbePrompt(token_ids=tokens, logprobs=expected)], tolerance=0.001)
    options = v.UpdateOptions(pause=RETRACT, verify=verify, probe=probe)
    plan = await begin(three, apply=v.APPLY_MODE_STAGED, options=options, **rolling(2))
    await join(three, plan)
    await write(three, plan, "w1")
    seen: list[tuple[str, bool]] = []

    async def look(engine: FakeEngine, *_: object) -> None:
        seen.append((engine.weights, three.stage("a").routable))

    with hooked(three, "a", "check_weights", look):
        operation = await commit(three, plan)
    assert ("w1", False) in seen, "computed with what was swapped in, served by nobody"
    if right:
        assert operation.state == OPERATION_STATE_OK, operation
        assert {result.verified for result in operation.stage_results} == {verify}
        assert operation.verification.computed == common.VERIFICATION_LEVEL_PROBE
        assert all(three.stage(slot).routable for slot in "abc")
        return
    assert operation.state == OPERATION_STATE_FAILED
    assert {result.error.reason for result in operation.stage_results if result.slot in "ab"} == {"PROBE_MISMATCH"}
    assert outcomes(operation) == {"a": OUTCOME_DIRTY, "b": OUTCOME_DIRTY, "c": OUTCOME_REJECTED}
    assert [three.stage(slot).routable for slot in "abc"] == [False, False, True]
    assert held(three) == {"a": "w1", "b": "w1", "c": "one"}
    assert version_of(three) == ("initial", 1)


async def test_an_answer_for_all_ranks_of_a_swap_proves_nothing(make_fleet: Callable) -> None:
    async with make_fleet(a=1, heal=False, options={"opaque": "unsaid"}) as fleet:
        plan = await stage_weights(fleet, "w1")
        operation = await commit(fleet, plan, digest("w1"))
        assert operation.state == OPERATION_STATE_FAILED
        assert operation.stage_results[0].error.reason == "VERIFICATION_UNREACHABLE"


async def test_a_delta_is_staged_over_a_copy_of_its_base(three: InProcessFleet) -> None:
    delta = {"kind": v.UPDATE_KIND_DELTA, "base": common.WeightVersion(label="initial")}
    options = v.UpdateOptions(pause=RETRACT)
    plan = await begin(three, apply=v.APPLY_MODE_STAGED, options=options, **delta)
    operation = await commit(three, plan, digest("one"))
    assert operation.state == OPERATION_STATE_OK, operation.error
    assert weights(three) == ["one"] * 4
    assert {result.verified for result in operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}


async def test_with_a_quorum_the_rest_swaps_and_who_failed_stays_whole_but_stale(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1", quorum=2)
    three.workers["b", 1]._follower._engine._shadow = "off by a byte"
    operation = await commit(three, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_PARTIAL
    assert outcomes(operation) == {"a": OUTCOME_APPLIED, "b": OUTCOME_REJECTED, "c": OUTCOME_APPLIED}
    assert held(three) == {"a": "w1", "b": "one", "c": "w1"}
    assert states(three) == {"a": STAGE_STATE_READY, "b": STAGE_STATE_STALE, "c": STAGE_STATE_READY}


async def test_an_abort_after_everybody_is_prepared_leaves_the_fleet_as_it_was(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1")
    for slot in "abc":
        request = v.SealUpdateRequest(header=common.RequestHeader(fence=common.Fence(update_id=plan.update_id)))
        update = three.server.coordinator.updates._open[plan.update_id]
        await update.step(request, [three.server.coordinator.roster.slots[slot]])
        assert three.stage(slot).report.update_prepared
    operation = await abort(three, plan)
    assert set(outcomes(operation).values()) == {OUTCOME_REJECTED}
    assert all(three.stage(slot).routable and not three.stage(slot).report.update_id for slot in "abc")
    assert {stage._engine._shadow for stage in three.stages.values()} == {None}


async def test_a_swap_of_unknown_outcome_is_dirty(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1")
    error = Reason.RANK_SILENT.error("silent", outcome=OUTCOME_UNKNOWN)
    with hooked(three, "b", "commit_update", failing(error), rank=1):
        operation = await commit(three, plan)
    assert operation.state == OPERATION_STATE_FAILED
    assert version_of(three) == ("initial", 1)
    assert outcomes(operation)["b"] == OUTCOME_DIRTY
    assert three.stage("b").state == STAGE_STATE_DIRTY
    assert not three.stage("b").routable


async def test_an_owner_that_is_gone_costs_nothing(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1", lease_ttl=duration(0.2))
    run = three.server.coordinator.operations.get(plan.update_id)
    async with asyncio.timeout(10):
        await run.ended.wait()
    assert run.operation.error.reason == "LEASE_EXPIRED"
    assert all(three.stage(slot).routable for slot in "abc")
    assert weights(three) == ["one"] * 4


async def test_a_prepared_stage_keeps_its_copy_until_a_coordinator_decides(
    three: InProcessFleet, tmp_path: Path
) -> None:
    await stage_weights(three, "w1")
    await three.server.coordinator._peers.stop()  # as if it had died: nobody is told anything
    assert {stage._engine._shadow for stage in three.stages.values()} == {"w1"}
    successor = InProcessFleet(tmp_path / "another.db", [], heal=False)
    await successor.start_coordinator()
    for slot in "abc":
        await successor.server.coordinator.adopt(three.stages[slot].address)
    await successor.until(
        lambda stages: len(stages) == 3 and all(stage.routable and not stage.report.update_id for stage in stages)
    )
    assert {stage._engine._shadow for stage in three.stages.values()} == {None}
    assert weights(three) == ["one"] * 4
    await successor.channel.close()
    await successor.server.stop()


async def test_from_disk_staged(three: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    request = v.UpdateWeightsFromDiskRequest(
        model_path=checkpoint("two"),
        expected_digest=digest("two"),
        options=v.UpdateOptions(pause=RETRACT),
        apply=v.APPLY_MODE_STAGED,
        max_unavailable=1,
    )
    operation = await three.stub.UpdateWeightsFromDisk(request)
    assert operation.state == OPERATION_STATE_OK, operation
    assert weights(three) == ["two"] * 4
    assert all(three.stage(slot).report.checkpoint == request.model_path for slot in "abc")


async def test_an_engine_without_shadow_copies_is_refused_by_name(three: InProcessFleet) -> None:
    three.server.coordinator.roster.slots["b"].record.registration.capabilities.staged_apply = False
    error = await refusal(begin(three, apply=v.APPLY_MODE_STAGED, options=v.UpdateOptions(pause=RETRACT)))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "apply")
    assert error.message.startswith("b:")


async def test_nccl_beside_the_collectives_of_several_ranks_is_refused_by_name(three: InProcessFleet) -> None:
    options, transports = v.UpdateOptions(pause=RETRACT), [common.TRANSPORT_TORCH_NCCL]
    error = await refusal(begin(three, options=options, transports=transports))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "transports")
    assert error.message == "a joins no nccl group"
    for slot in three.server.coordinator.roster.slots.values():
        slot.record.registration.capabilities.transports.extend(transports)
    error = await refusal(begin(three, apply=v.APPLY_MODE_STAGED, options=options, transports=transports))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "transports")
    assert error.message.startswith("b:")


# Rolling.


def rolling(k: int) -> dict[str, u.RolloutStrategy]:
    return {"rollout": u.RolloutStrategy(max_unavailable=k)}


async def test_batches_take_the_version_one_after_the_other(three: InProcessFleet) -> None:
    seen: list[tuple[dict[str, bool], list[str], dict[str, str]]] = []

    async def look(*_: object) -> None:
        admitted = three.server.coordinator.roster.models["actor"].admitted
        routable = {slot: three.stage(slot).routable for slot in "abc"}
        seen.append((routable, [version.label for version in admitted], held(three)))

    plan = await stage_weights(three, "w1", **rolling(1))
    with hooked(three, "b", "commit_update", look):
        operation = await commit(three, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_OK, operation
    assert seen == [({"a": True, "b": False, "c": True}, ["initial", "step-1"], {"a": "w1", "b": "one", "c": "one"})]
    assert weights(three) == ["w1"] * 4
    assert [version.label for version in three.server.coordinator.roster.models["actor"].admitted] == ["step-1"]
    assert all(three.stage(slot).routable for slot in "abc")


async def test_no_more_than_allowed_are_out_of_service(make_fleet: Callable) -> None:
    async with make_fleet(a=1, b=1, c=1, d=1, e=1) as fleet:
        least = 5
        watching = asyncio.Event()

        async def watch() -> None:
            nonlocal least
            async with aclosing(fleet.server.coordinator.roster.watch()) as events:
                async for _ in events:
                    watching.set()
                    least = min(least, sum(fleet.stage(slot).routable for slot in "abcde"))

        plan = await stage_weights(fleet, "w1", **rolling(2))
        task = asyncio.create_task(watch())
        await watching.wait()
        assert (await commit(fleet, plan)).state == OPERATION_STATE_OK
        task.cancel()
        assert least == 3


@pytest.mark.parametrize("outcome", [OUTCOME_REJECTED, OUTCOME_UNKNOWN])
async def test_a_second_batch_that_fails_leaves_the_first_serving_and_the_rest_stale(
    three: InProcessFleet, outcome: int
) -> None:
    plan = await stage_weights(three, "w1", **rolling(1))
    with hooked(three, "b", "commit_update", failing(Reason.ENGINE_FAILED.error("no swap", outcome=outcome)), rank=1):
        operation = await commit(three, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_PARTIAL
    assert version_of(three) == ("step-1", 2)
    found = outcomes(operation)
    assert (found["a"], found["c"]) == (OUTCOME_APPLIED, OUTCOME_REJECTED)
    assert found["b"] == (OUTCOME_UNKNOWN if outcome == OUTCOME_UNKNOWN else OUTCOME_REJECTED)
    assert three.stage("a").routable
    assert not three.stage("b").routable
    assert not three.stage("c").routable
    assert three.stage("c").state == STAGE_STATE_STALE
    assert three.stage("b").state == (STAGE_STATE_DIRTY if outcome == OUTCOME_UNKNOWN else STAGE_STATE_STALE)
    assert held(three) == {"a": "w1", "b": "one", "c": "one"}
    admitted = three.server.coordinator.roster.models["actor"].admitted
    assert [version.label for version in admitted] == ["step-1"]
    assert not any(three.stage(slot).report.update_id for slot in "abc")


async def test_a_stage_that_could_not_flush_after_its_swap_serves_nothing(three: InProcessFleet) -> None:
    """The version is published and admitted, so that nothing but a quarantine keeps it from serving old KV entries."""
    plan = await stage_weights(three, "w1", **rolling(1))
    with hooked(three, "b", "flush_cache", failing(Reason.ENGINE_FAILED.error("no flush"))):
        operation = await commit(three, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_PARTIAL
    assert outcomes(operation) == {"a": OUTCOME_APPLIED, "b": OUTCOME_DIRTY, "c": OUTCOME_REJECTED}
    seen = three.stage("b")
    assert seen.HasField("quarantine")
    assert not seen.routable
    assert not three.stages["b"]._stage.report().lease_held


async def test_a_later_batch_is_on_record_as_out_of_service_until_it_is_done(three: InProcessFleet) -> None:
    """The version is published: nothing else tells the next coordinator that a swap was not flushed and probed yet."""
    seen = []

    async def look(*_: object) -> None:
        facts = three.stages["b"]._stage.facts
        records = dict(three.server.coordinator._journal.read("slot"))
        quarantine = SlotRecord.FromString(records["b"]).quarantine
        seen.append((facts.state, list(facts.admitted), quarantine.reason))

    plan = await stage_weights(three, "w1", **rolling(1))
    with hooked(three, "b", "flush_cache", look):
        assert (await commit(three, plan, digest("w1"))).state == OPERATION_STATE_OK
    assert seen == [(common.STAGE_STATE_UPDATING, [], "WEIGHTS_STALE")]
    assert not any(three.stage(slot).HasField("quarantine") for slot in "abc")


async def test_a_first_batch_that_fails_publishes_nothing(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1", **rolling(1))
    with hooked(three, "a", "commit_update", failing(Reason.ENGINE_FAILED.error("no swap"))):
        operation = await commit(three, plan)
    assert operation.state == OPERATION_STATE_FAILED
    assert version_of(three) == ("initial", 1)
    assert set(outcomes(operation).values()) == {OUTCOME_REJECTED}
    await three.until(lambda stages: all(stage.routable for stage in stages))
    assert weights(three) == ["one"] * 4


async def test_what_a_quorum_allows_does_not_stop_the_rolling(three: InProcessFleet) -> None:
    plan = await stage_weights(three, "w1", quorum=1, **rolling(1))
    with hooked(three, "a", "commit_update", failing(Reason.ENGINE_FAILED.error("no swap"))):
        operation = await commit(three, plan)
    assert operation.state == OPERATION_STATE_PARTIAL
    assert outcomes(operation) == {"a": OUTCOME_REJECTED, "b": OUTCOME_APPLIED, "c": OUTCOME_APPLIED}
    assert held(three) == {"a": "one", "b": "w1", "c": "w1"}
    assert three.stage("a").state == STAGE_STATE_STALE


async def test_what_was_paused_by_name_stays_paused(three: InProcessFleet) -> None:
    target = common.RequestHeader(target=common.Target(slots=["b"]))
    await three.stub.PauseGeneration(v.PauseGenerationRequest(header=target))
    plan = await stage_weights(three, "w1", **rolling(1))
    assert (await commit(three, plan)).state == OPERATION_STATE_OK
    assert states(three) == {"a": STAGE_STATE_READY, "b": STAGE_STATE_PAUSED, "c": STAGE_STATE_READY}


async def test_a_version_that_was_published_is_not_reported_as_failed_when_the_journal_is_full(
    three: InProcessFleet,
) -> None:
    journal = three.server.coordinator._journal
    write_through = journal.write

    async def refuse(_: object) -> None:
        raise Reason.JOURNAL_FAILED.error("no space is left")

    async def fill(*_: object) -> None:
        journal.write = refuse  # type: ignore[method-assign]

    plan = await stage_weights(three, "w1", **rolling(1))
    with hooked(three, "c", "commit_update", fill):
        operation = await commit(three, plan, digest("w1"))
    journal.write = write_through  # type: ignore[method-assign]
    assert version_of(three) == (plan.version.label, plan.version.sequence)
    assert operation.state == OPERATION_STATE_PARTIAL, operation
    # On record, the last batch is out of service: it is healed.
    assert {slot: three.stage(slot).routable for slot in "abc"} == {"a": True, "b": True, "c": False}


async def test_that_a_target_has_read_is_no_answer_when_the_rolling_breaks_off_and_the_disk_is_full(
    three: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    journal = three.server.coordinator._journal
    write_through = journal.write
    path = checkpoint("two")

    async def refuse(_: object) -> None:
        raise Reason.JOURNAL_FAILED.error("no space is left")

    async def fault(engine: FakeEngine, name: str, call: Call) -> None:
        if engine is three.stages["b"]._engine and name == "commit_update":
            journal.write = refuse  # type: ignore[method-assign]
        if engine is three.stages["c"]._engine and name == "abort_update":  # to be quarantined for
            raise Reason.ENGINE_FAILED.error("out of memory", outcome=OUTCOME_DIRTY)

    fake_engine.FAULTS[three.specs[0].model_path, 0] = fault
    request = v.UpdateWeightsFromDiskRequest(
        model_path=path, apply=v.APPLY_MODE_STAGED, max_unavailable=1, options=v.UpdateOptions(pause=RETRACT)
    )
    operation = await three.stub.UpdateWeightsFromDisk(request)
    del fake_engine.FAULTS[three.specs[0].model_path, 0]
    journal.write = write_through  # type: ignore[method-assign]
    assert version_of(three)[1] == 2
    assert operation.state == OPERATION_STATE_PARTIAL, operation
    results = {result.slot: result for result in operation.stage_results}
    assert results["c"].outcome == OUTCOME_UNKNOWN
    assert results["c"].error.reason == "JOURNAL_FAILED"
    assert results["a"].outcome == OUTCOME_APPLIED
