"""Stages that are brought to the published version without the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fleet_steps import dirty, restart_coordinator
from journal_faults import at_write
from updating import abort, begin, commit, digest, from_disk, join, refusal, restart, update, version_of, weights, write
from waiting import eventually

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason
from rlctl.contract.fingerprints import fingerprints
from rlctl.coordinator.fleet import stage_links
from rlctl.coordinator.healing.healer import HEAL_S, MAKE_WAY_S
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.coordinator.updates.manager import Graces
from rlctl.engine import Call, EngineInfo
from rlctl.ports import Delete, Put
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.coordinator_pb2 import HealStageRequest, SetHealingRequest
from rlctl.v1.journal_pb2 import ModelRecord, OperationRecord, SlotRecord
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_OK,
    OPERATION_STATE_PARTIAL,
    OPERATION_STATE_UNKNOWN,
    OPERATION_STATE_UNSPECIFIED,
)

Checkpoint = Callable[[str], str]
START = FakeEngine.start


def held_read(fleet: InProcessFleet) -> tuple[asyncio.Event, asyncio.Event]:
    """Stage a's first read from disk says that it has begun, and waits to be told to go on."""
    reading, going_on = asyncio.Event(), asyncio.Event()

    async def wait(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "update_weights_from_disk" and engine.config.tp_size == 1 and not reading.is_set():
            reading.set()
            await going_on.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
    return reading, going_on


async def scramble(fleet: InProcessFleet, *slots: str) -> None:
    """Nobody knows what these hold."""
    for slot in slots:
        request = v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS)
        request.header.target.slots.append(slot)
        await fleet.stub.CheckWeights(request)
    await fleet.until(
        lambda stages: all(s.state == common.STAGE_STATE_DIRTY for s in stages if s.registration.slot in slots)
    )


async def test_an_engine_that_was_restarted_gets_the_published_version_by_itself(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    await restart(fleet, "a")
    await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].routable)
    assert fleet.stage("a").report.weight_version.label == "two"
    assert set(weights(fleet)) == {"two"}
    assert version_of(fleet) == ("two", 2), "a heal publishes nothing"
    assert fleet.stage("b").routable


async def test_without_the_policy_it_waits_for_the_operator(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(heal=False, a=1, b=2) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        await restart(fleet, "a")
        # What holds for one model does not for another.
        fleet.specs.append(StageSpec("critic", checkpoint("early"), model="critic"))
        await fleet.start_stage(fleet.specs[-1])
        await fleet.until(lambda stages: stages[2].routable)
        late = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("late"), weight_version="late")
        late.header.target.model = "critic"
        assert (await fleet.stub.UpdateWeightsFromDisk(late)).state == OPERATION_STATE_OK
        await restart(fleet, "critic")
        await fleet.until(lambda stages: stages[2].incarnation == 2 and stages[2].routable)
        stale = fleet.stage("a")
        assert (stale.incarnation, stale.state) == (2, common.STAGE_STATE_STALE)
        operation = await fleet.stub.HealStage(HealStageRequest())
        assert operation.state == OPERATION_STATE_OK
        assert [result.slot for result in operation.stage_results] == ["a"]
        assert fleet.stage("a").routable
        assert sorted(weights(fleet)) == ["late", "two", "two", "two"]


async def test_dirty_stages_are_healed_when_somebody_asks(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    await dirty(fleet)
    assert (await fleet.stub.HealStage(HealStageRequest(slots=["b"]))).state == OPERATION_STATE_OK
    assert (fleet.stage("a").routable, fleet.stage("b").routable) == (False, True)
    assert not fleet.stage("b").HasField("quarantine")
    assert (await fleet.stub.HealStage(HealStageRequest())).state == OPERATION_STATE_OK
    assert fleet.stage("a").routable
    assert set(weights(fleet)) == {"two"}


async def test_what_has_another_digest_than_the_version_is_not_served(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    await dirty(fleet)
    request = HealStageRequest(slots=["a"], checkpoint=checkpoint("another"))
    operation = await fleet.stub.HealStage(request)
    assert operation.state != OPERATION_STATE_OK
    assert operation.stage_results[0].error.reason == "DIGEST_MISMATCH"
    assert fleet.stage("a").state == common.STAGE_STATE_DIRTY
    assert (await fleet.stub.HealStage(HealStageRequest())).state == OPERATION_STATE_OK
    assert all(fleet.stage(slot).routable for slot in "ab")


@pytest.mark.parametrize("told_by", ["the sources", "a peer"])
async def test_what_differs_is_named(make_fleet: Callable[..., Any], checkpoint: Checkpoint, told_by: str) -> None:
    async with make_fleet(heal=False, a=1, b=2) as fleet:
        if told_by == "a peer":
            await from_disk(fleet, checkpoint("two"), "two")
            await restart(fleet, "a")
            await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        else:
            plan = await begin(fleet)
            await join(fleet, plan)
            await write(fleet, plan, "sent")
            await commit(fleet, plan, digest("sent"), fingerprints=fingerprints({"weights": digest("sent")}))
            await dirty(fleet)
        operation = await fleet.stub.HealStage(HealStageRequest(slots=["a"], checkpoint=checkpoint("another")))
        error = operation.stage_results[0].error
        assert error.reason == "DIGEST_MISMATCH"
        assert (error.metadata["tensor"], error.metadata["ranks"]) == ("weights", "0")
        assert "a: " in operation.error.message
        assert "of 1 tensors only weights differs, at rank 0" in operation.error.message


async def test_a_version_that_no_checkpoint_has_needs_the_trainer(fleet: InProcessFleet, tmp_path: Path) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "sent")
    await commit(fleet, plan, digest("sent"))
    await restart(fleet, "a")
    await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
    error = await refusal(fleet.stub.HealStage(HealStageRequest()))
    assert error.reason is Reason.UNHEALABLE
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "weights.txt").write_text("sent")
    assert (await fleet.stub.HealStage(HealStageRequest(checkpoint=str(saved)))).state == OPERATION_STATE_OK
    assert fleet.stage("a").routable


async def test_an_update_does_not_wait_for_a_heal(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    reading, going_on = held_read(fleet)
    await restart(fleet, "a")
    await reading.wait()
    beginning = asyncio.ensure_future(begin(fleet, "three"))
    await asyncio.sleep(0.1)
    going_on.set()
    plan = await beginning
    assert [target.slot for target in plan.targets] == ["a", "b"]
    await join(fleet, plan)
    await write(fleet, plan, "three")
    assert (await commit(fleet, plan, digest("three"))).state == OPERATION_STATE_OK
    assert set(weights(fleet)) == {"three"}
    healed = fleet.server.coordinator.operations.newest_first("HealStage", 0)[0].operation
    assert healed.error.reason == "CANCELLED"


@pytest.mark.parametrize("slots", [[], ["b"]])
async def test_what_somebody_asks_for_does_not_wait_for_a_heal_that_nobody_asked_for(
    fleet: InProcessFleet, checkpoint: Checkpoint, slots: list[str]
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    reading, going_on = held_read(fleet)
    await restart(fleet, "a")
    await reading.wait()
    pause = v.PauseGenerationRequest()
    pause.header.target.slots.extend(slots)
    pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(pause))
    await asyncio.wait({pausing}, timeout=0.1)
    going_on.set()
    paused = await pausing
    assert (paused.state, [result.slot for result in paused.stage_results]) == (OPERATION_STATE_OK, slots or ["a", "b"])
    ended = fleet.server.coordinator.operations.newest_first("HealStage", 0)[-1].operation
    assert (ended.error.reason, ended.error.message) == ("CANCELLED", "PauseGeneration goes first")
    await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].report.weight_version.label == "two")
    assert set(weights(fleet)) == {"two"}, "it is tried again"


async def test_what_somebody_asks_for_waits_for_no_heal_of_another_stage_that_is_just_accepted(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    reading, going_on = held_read(fleet)
    await restart(fleet, "b")
    await fleet.until(lambda stages: stages[1].incarnation == 2 and stages[1].routable)
    await restart(fleet, "a")
    await reading.wait()
    await restart(fleet, "b")
    await fleet.until(lambda stages: stages[1].incarnation == 3 and stages[1].state == common.STAGE_STATE_STALE)
    healer, accepted = fleet.server.coordinator.updates._healer, asyncio.Event()

    async with at_write(fleet, lambda put: put.kind == "operation", before=accepted.wait):
        healing = asyncio.ensure_future(healer.heal(HealStageRequest(slots=["b"]), None, requested=False))
        await eventually(lambda: len(healer._heals) == 2)
        pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest()))
        await asyncio.wait({pausing}, timeout=0.1)
        going_on.set()
        await asyncio.wait({pausing}, timeout=0.3)
        accepted.set()
        assert (await pausing).state == OPERATION_STATE_OK
    await (await healing).ended.wait()


async def test_a_heal_that_somebody_asked_for_is_named_to_who_is_in_its_way(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        reading, going_on = held_read(fleet)
        await restart(fleet, "a")
        await fleet.until(lambda stages: (stages[0].incarnation, stages[0].state) == (2, common.STAGE_STATE_STALE))
        healing = asyncio.ensure_future(fleet.stub.HealStage(HealStageRequest()))
        await reading.wait()
        for slots in ([], ["b"]):
            flush = v.FlushCacheRequest()
            flush.header.target.slots.extend(slots)
            error = await refusal(fleet.stub.FlushCache(flush))
            assert (error.reason, error.metadata["owner"]) == (Reason.UPDATE_IN_PROGRESS, "healing a")
        going_on.set()
        assert (await healing).state == OPERATION_STATE_OK


async def test_a_stage_that_serves_needs_no_heal(fleet: InProcessFleet) -> None:
    error = await refusal(fleet.stub.HealStage(HealStageRequest(slots=["a"])))
    assert error.reason is Reason.ILLEGAL_STATE
    error = await refusal(fleet.stub.HealStage(HealStageRequest()))
    assert error.reason is Reason.NO_TARGETS


async def test_several_late_stages_are_healed_one_after_the_other(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(a=1, b=1, c=1) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        await asyncio.gather(*(fleet.stages.pop(slot).stop() for slot in "abc"))
        await asyncio.gather(*(fleet.start_stage(spec) for spec in fleet.specs))
        await fleet.until(lambda stages: all(stage.incarnation == 2 and stage.routable for stage in stages), 20)
        assert set(weights(fleet)) == {"two"}


async def test_an_update_that_is_refused_does_not_end_a_heal_for_good(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    reading, going_on = held_read(fleet)
    await restart(fleet, "a")
    await reading.wait()
    beginning = asyncio.ensure_future(refusal(begin(fleet, "x", options=v.UpdateOptions(quorum=99))))
    await asyncio.sleep(0.1)
    going_on.set()
    assert (await beginning).field == "options.quorum"
    operation = fleet.server.coordinator.operations.newest_first("HealStage", 0)[0].operation
    assert operation.error.reason in ("CANCELLED", "")
    await fleet.until(lambda stages: stages[0].routable or stages[0].state == common.STAGE_STATE_DIRTY, 20)


async def test_a_trainer_that_is_over_ends_no_heal(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    """It may ask again every second, which no heal would get through."""
    await abort(fleet, await begin(fleet, "x", trainer=u.Trainer(incarnation=5)))
    await from_disk(fleet, checkpoint("two"), "two")
    reading, going_on = held_read(fleet)
    await restart(fleet, "a")
    await reading.wait()
    older = await asyncio.wait_for(refusal(begin(fleet, "x", trainer=u.Trainer(incarnation=4))), 5)
    assert older.reason is Reason.TRAINER_FENCED
    going_on.set()
    await fleet.until(lambda stages: stages[0].routable, 20)
    (healed,) = fleet.server.coordinator.operations.newest_first("HealStage", 0)
    await healed.ended.wait()
    assert healed.operation.state == OPERATION_STATE_OK


async def test_weights_that_something_else_has_written_to_are_found_by_a_check_and_healed(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    fleet.workers["b", 1]._follower._engine.weights = "another's"  # type: ignore[attr-defined]
    fleet.stages["b"]._engine.weights = "another's"  # type: ignore[attr-defined]
    checked = await fleet.stub.CheckWeights(v.CheckWeightsRequest())
    assert checked.state == OPERATION_STATE_PARTIAL
    good, bad = checked.stage_results
    assert (good.outcome, bad.outcome) == (common.OUTCOME_APPLIED, common.OUTCOME_DIRTY)
    assert (bad.error.reason, bad.state) == (Reason.DIGEST_MISMATCH.name, common.STAGE_STATE_DIRTY)
    assert digest("another's") in bad.error.message
    assert digest("two") in bad.error.message
    assert not fleet.stage("b").routable
    assert [rank.check.model_digest for rank in bad.rank_results] == [digest("another's")] * 2
    assert (await fleet.stub.HealStage(HealStageRequest())).state == OPERATION_STATE_OK
    assert fleet.stage("b").routable
    assert set(weights(fleet)) == {"two"}


async def test_a_check_that_an_update_has_overtaken_says_nothing_about_the_new_version(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    checking, going_on = asyncio.Event(), asyncio.Event()

    async def look_too_early(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "check_weights" and not checking.is_set():
            checking.set()
            await going_on.wait()
            engine.weights = "half"

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = look_too_early
    request = v.CheckWeightsRequest()
    request.header.target.slots.append("a")
    checked = asyncio.ensure_future(fleet.stub.CheckWeights(request))
    await checking.wait()
    await from_disk(fleet, checkpoint("two"), "two")
    known = fleet.stage("a").report.model_digest
    going_on.set()
    (result,) = (await checked).stage_results
    assert (result.outcome, result.rank_results[0].check.model_digest) == (common.OUTCOME_APPLIED, digest("half"))
    assert fleet.stage("a").routable
    assert fleet.stage("a").report.model_digest == known


async def test_what_a_heal_has_not_verified_is_quarantined_in_the_journal(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    await dirty(fleet)
    found: list[str] = []

    async def look(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "check_weights" and engine.config.tp_size == 1 and not found:
            records = dict(fleet.server.coordinator._journal.read("slot"))
            found.append(SlotRecord.FromString(records["a"]).quarantine.reason)

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = look
    assert (await fleet.stub.HealStage(HealStageRequest(slots=["a"]))).state == OPERATION_STATE_OK
    # Whoever takes over in the middle finds it, and grants the stage nothing.
    assert found == ["WEIGHTS_STALE"]
    records = dict(fleet.server.coordinator._journal.read("slot"))
    assert not SlotRecord.FromString(records["a"]).HasField("quarantine")
    assert fleet.stage("a").routable


async def test_a_partial_update_is_for_targets_that_are_at_the_version_that_it_leaves_parts_of(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(heal=False, a=1, b=2) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        error = await refusal(begin(fleet, kind=v.UPDATE_KIND_PARTIAL))
        assert (error.reason, error.field) == (Reason.BASE_MISMATCH, "kind")
        assert error.message.startswith("a is not at version 'two'")
        plan = await begin(fleet, kind=v.UPDATE_KIND_PARTIAL, options=v.UpdateOptions(quorum=1))
        assert [target.slot for target in plan.targets] == ["b"]


async def test_what_a_quarantined_stage_would_leave_as_it_is_nobody_vouches_for(make_fleet: Callable[..., Any]) -> None:
    """A heal that its coordinator did not live to verify, say: the stage itself says that it is at the version."""
    async with make_fleet(heal=False, a=1, b=2) as fleet:
        roster = fleet.server.coordinator.roster
        await roster.quarantine({roster.slots["a"]: Reason.WEIGHTS_STALE.error("not verified yet").detail()})
        error = await refusal(begin(fleet, kind=v.UPDATE_KIND_PARTIAL))
        assert (error.reason, error.field) == (Reason.BASE_MISMATCH, "kind")
        assert error.message == "a is possibly not at version 'initial': not verified yet"
        plan = await begin(fleet, kind=v.UPDATE_KIND_PARTIAL, options=v.UpdateOptions(quorum=1))
        assert [target.slot for target in plan.targets] == ["b"]
        await abort(fleet, plan)
        plan = await begin(fleet)
        assert [target.slot for target in plan.targets] == ["a", "b"]


async def test_a_stage_that_has_lost_a_rank_is_not_healed_and_keeps_nobody_waiting(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    await dirty(fleet)
    await fleet.workers["b", 1].stop()
    await fleet.until(lambda stages: stages[1].report.HasField("quarantine"))
    error = await refusal(fleet.stub.HealStage(HealStageRequest(slots=["b"])))
    assert error.reason is Reason.RANK_LOST
    operation = await fleet.stub.HealStage(HealStageRequest())
    assert (operation.state, list(operation.targets)) == (OPERATION_STATE_OK, ["a"])


async def test_a_heal_that_ends_with_another_digest_names_the_tensor(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(a=1, b=2, c=1, heal=False) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        request = HealStageRequest(slots=["a"], checkpoint=checkpoint("another"))
        error = (await fleet.stub.HealStage(request)).stage_results[0].error
        assert (error.reason, error.metadata["tensor"]) == ("DIGEST_MISMATCH", "weights")
        assert "of 1 tensors only weights differs" in error.message


@pytest.mark.parametrize("refuses", ["the sender", "the receiver"])
@pytest.mark.parametrize("at", ["the probe", "the rendezvous"])
async def test_a_heal_from_a_peer_waits_for_nobody_when_one_side_cannot_join(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, refuses: str, at: str
) -> None:
    left = asyncio.Event()
    waited: list[str] = []

    async def join_group(engine: FakeEngine, request: v.InitWeightsUpdateGroupRequest, call: Call) -> v.GroupReport:
        sends = request.rank_offset == 0
        healing = request.group_name.endswith("-heal")
        if healing and (sends == (refuses == "the sender")) and request.probe_only == (at == "the probe"):
            raise Reason.GROUP_FAILED.error("there is no way to the store")
        if healing and not request.probe_only:
            waited.append(call.command_id)
            await left.wait()
            raise Reason.GROUP_FAILED.error("told to leave")
        return await init(engine, request, call)

    async def leave(engine: FakeEngine, request: v.DestroyWeightsUpdateGroupRequest, call: Call) -> None:
        left.set()

    async def start(engine: FakeEngine, setup: Any) -> Any:
        info = await started(engine, setup)
        info.layout.store_host, info.layout.store_port = "127.0.0.1", 1
        return info

    init, started = FakeEngine.init_weights_update_group, FakeEngine.start
    monkeypatch.setattr(FakeEngine, "start", start)
    monkeypatch.setattr(FakeEngine, "send_weights", leave, raising=False)
    async with make_fleet(a=1, b=1, heal=False) as fleet:
        await update(fleet, "sent")
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        monkeypatch.setattr(FakeEngine, "init_weights_update_group", join_group)
        monkeypatch.setattr(FakeEngine, "destroy_weights_update_group", leave)
        async with asyncio.timeout(5.0):
            operation = await fleet.stub.HealStage(HealStageRequest(slots=["a"]))
        assert operation.error.reason == "GROUP_FAILED"
        assert operation.error.message.endswith("there is no way to the store")
        assert len(waited) == (at == "the rendezvous")
        assert fleet.stage("b").routable


async def test_what_cannot_join_a_senders_group_is_not_healed_from_it(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fed by vLLM's own engine, say: it takes weights in, but not over such a group."""

    async def start(engine: FakeEngine, setup: Any) -> Any:
        info = await started(engine, setup)
        info.layout.store_host, info.layout.store_port = "127.0.0.1", 1
        return info

    async def send(engine: FakeEngine, request: v.SendWeightsRequest, call: Call) -> None:
        raise AssertionError("nobody takes it in")

    started = FakeEngine.start
    monkeypatch.setattr(FakeEngine, "start", start)
    monkeypatch.setattr(FakeEngine, "send_weights", send, raising=False)
    async with make_fleet(a=1, b=1, heal=False) as fleet:
        await update(fleet, "sent")
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        registration = fleet.server.coordinator.roster.slots["a"].record.registration
        registration.capabilities.transports[:] = [common.TRANSPORT_VLLM_NCCL, common.TRANSPORT_DISK]
        error = await refusal(fleet.stub.HealStage(HealStageRequest(slots=["a"])))
        assert error.reason is Reason.UNHEALABLE
        assert "is in no checkpoint, and a joins no group in which another stage could send it" in error.message


async def test_what_a_peer_sends_may_take_as_long_as_the_heal(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    async def join_group(engine: FakeEngine, request: v.InitWeightsUpdateGroupRequest, call: Call) -> v.GroupReport:
        limits.append(seconds(request.group_timeout))
        raise Reason.GROUP_FAILED.error("that is all that was to be known")

    async def start(engine: FakeEngine, setup: Any) -> Any:
        info = await started(engine, setup)
        info.layout.store_host, info.layout.store_port = "127.0.0.1", 1
        return info

    started = FakeEngine.start
    monkeypatch.setattr(FakeEngine, "start", start)
    monkeypatch.setattr(FakeEngine, "send_weights", FakeEngine.flush_cache, raising=False)
    async with make_fleet(a=1, b=1, heal=False) as fleet:
        await update(fleet, "sent")
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        monkeypatch.setattr(FakeEngine, "init_weights_update_group", join_group)
        await fleet.stub.HealStage(HealStageRequest(slots=["a"]))
    assert min(limits) > HEAL_S / 2


async def test_a_heals_group_is_on_record_until_everybody_has_left_it(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that is killed meanwhile has a successor that lets both ends leave it."""
    recorded: list[list[str]] = []
    deaf = True

    async def start(engine: FakeEngine, setup: Any) -> Any:
        info = await started(engine, setup)
        info.layout.store_host, info.layout.store_port = "127.0.0.1", 1
        return info

    def heals() -> list[str]:
        records = [ModelRecord.FromString(body) for _, body in fleet.server.coordinator._journal.read("model")]
        return [name for record in records for name in record.groups if name.endswith("-heal")]

    async def send(engine: FakeEngine, request: v.SendWeightsRequest, call: Call) -> None:
        recorded.append(heals())
        raise Reason.GROUP_FAILED.error("the group is gone")

    async def leave(engine: FakeEngine, request: v.DestroyWeightsUpdateGroupRequest, call: Call) -> None:
        if deaf and request.group_name.endswith("-heal"):
            raise Reason.ENGINE_FAILED.error("not now")
        await left(engine, request, call)

    started, left = FakeEngine.start, FakeEngine.destroy_weights_update_group
    monkeypatch.setattr(FakeEngine, "start", start)
    monkeypatch.setattr(FakeEngine, "send_weights", send, raising=False)
    monkeypatch.setattr(FakeEngine, "destroy_weights_update_group", leave)
    async with make_fleet(a=1, b=1, heal=False) as fleet:
        await update(fleet, "sent")
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        await fleet.stub.HealStage(HealStageRequest(slots=["a"]))
        assert heals() == recorded[0] != []
        deaf = False
        await update(fleet, "next")
        groups = [stage._engine._groups for stage in fleet.stages.values()]  # type: ignore[attr-defined]
        assert not [name for held in groups for name in held if name.endswith("-heal")]
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 3 and stages[0].state == common.STAGE_STATE_STALE)
        await fleet.stub.HealStage(HealStageRequest(slots=["a"]))
        assert len(recorded) == 2
        known = fleet.server.coordinator.roster.models["actor"].record.groups
        assert not [name for name in known if name.endswith("-heal")]
        await update(fleet, "after")
        assert heals() == []


async def test_a_coordinator_stops_although_a_heal_does_not_give_way(
    fleet: InProcessFleet, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    await dirty(fleet)
    reading, going_on = asyncio.Event(), asyncio.Event()

    async def wait(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "update_weights_from_disk" and engine.config.tp_size == 1:
            reading.set()
            await going_on.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
    healing = asyncio.ensure_future(fleet.stub.HealStage(HealStageRequest(slots=["a"])))
    await reading.wait()
    monkeypatch.setattr("rlctl.coordinator.healing.healer.MAKE_WAY_S", 0.05)
    stopping = asyncio.ensure_future(fleet.server.coordinator.stop())
    await asyncio.sleep(0.2)
    going_on.set()
    await stopping
    assert (await healing).error.reason == "CANCELLED"


async def test_what_nobody_could_verify_is_not_begun(make_fleet: Callable[..., Any], checkpoint: Checkpoint) -> None:
    async with make_fleet(a=1, b=1, heal=False) as fleet:
        plan = await begin(fleet, "two", options=v.UpdateOptions(verify=common.VERIFICATION_LEVEL_NONE))
        await join(fleet, plan)
        await write(fleet, plan, "two")
        await commit(fleet, plan)
        assert version_of(fleet) == ("two", 2)
        for slot in "ab":
            await restart(fleet, slot)
        await fleet.until(lambda stages: all(stage.state == common.STAGE_STATE_STALE for stage in stages))
        error = await refusal(fleet.stub.HealStage(HealStageRequest(slots=["a"], checkpoint=checkpoint("two"))))
        assert error.reason is Reason.UNHEALABLE
        assert "the version's digest is unknown" in error.message
        assert fleet.stage("a").state == common.STAGE_STATE_STALE


@pytest.mark.parametrize("first", ["a", "b"])
async def test_engines_that_cannot_be_compared_start_from_one_checkpoint(
    tmp_path: Path, checkpoint: Checkpoint, first: str
) -> None:
    """One says what it has read, and one cannot (vLLM's of two ranks without the extension, say)."""
    path = checkpoint("one")
    specs = {"a": StageSpec("a", path), "b": StageSpec("b", path, options={"opaque": "said"})}
    async with InProcessFleet(tmp_path / "journal", [specs.pop(first)]) as fleet:
        (late,) = specs.values()
        fleet.specs.append(late)
        await fleet.start_stage(late)
        stages = await fleet.until(lambda stages: all(stage.routable for stage in stages))
        assert {stage.report.weight_version.label for stage in stages} == {"initial"}
        assert not fleet.server.coordinator.operations.newest_first("", OPERATION_STATE_UNSPECIFIED)


async def start_silently(engine: FakeEngine, setup: Mapping[str, str]) -> EngineInfo:
    """As an engine does that says what it holds only when it is asked."""
    return dataclasses.replace(await START(engine, setup), model_digest="")


async def lay_down(fleet: InProcessFleet, slot: str) -> None:
    """A stage that sleeps can be compared with nobody."""
    target = common.RequestHeader(target=common.Target(slots=[slot]))
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=target))
    await fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest(header=target, tags=[common.MEMORY_TAG_KV_CACHE]))
    await fleet.until(lambda _: fleet.stage(slot).state == common.STAGE_STATE_ASLEEP)


async def wake(fleet: InProcessFleet, slot: str) -> None:
    target = common.RequestHeader(target=common.Target(slots=[slot]))
    await fleet.stub.ResumeMemory(v.ResumeMemoryRequest(header=target, tags=[common.MEMORY_TAG_KV_CACHE]))
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(header=target))
    await fleet.until(lambda _: fleet.stage(slot).routable)


async def test_once_nobody_can_compare_any_more_the_checkpoint_decides(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_links, "GRANT_EVERY_S", 0.05)
    path = checkpoint("one")
    specs = [StageSpec("a", path, options={"opaque": "said"}), StageSpec("b", path), StageSpec("c", path)]
    async with InProcessFleet(tmp_path / "journal", specs[:1], heal=False) as fleet:
        for spec in specs[1:]:
            fleet.specs.append(spec)
            with monkeypatch.context() as patch:
                if spec.slot == "b":
                    patch.setattr(FakeEngine, "start", start_silently)
                await fleet.start_stage(spec)
            state = common.STAGE_STATE_READY if spec.slot == "b" else common.STAGE_STATE_STALE
            await fleet.until(lambda stages, state=state: stages[-1].state == state)
        assert not fleet.server.coordinator.roster.models["actor"].record.model_digest
        await scramble(fleet, "b")
        await fleet.until(lambda stages: stages[-1].routable)
        assert fleet.server.coordinator.roster.models["actor"].record.model_digest == digest("one")


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_checkpoint_of_the_same_name_that_was_written_anew_is_not_the_version_though_nobody_can_compare(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, *, restarted: bool
) -> None:
    monkeypatch.setattr(stage_links, "GRANT_EVERY_S", 0.05)
    path = checkpoint("one")
    specs = [StageSpec("a", path, options={"opaque": "said"}), StageSpec("b", path), StageSpec("c", path)]
    async with InProcessFleet(tmp_path / "journal", specs[:1], heal=False) as fleet:
        fleet.specs.append(specs[1])
        await fleet.start_stage(specs[1])
        await fleet.until(lambda stages: stages[-1].routable)
        await lay_down(fleet, "b")
        (Path(path) / "weights.txt").write_text("two")
        if restarted:
            await restart_coordinator(fleet)
        fleet.specs.append(specs[2])
        await fleet.start_stage(specs[2])
        await fleet.until(lambda _: fleet.stage("c").state == common.STAGE_STATE_STALE)
        await wake(fleet, "b")
        assert fleet.stage("c").state == common.STAGE_STATE_STALE


async def test_a_stage_that_sleeps_and_could_be_asked_is_waited_for(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_links, "GRANT_EVERY_S", 0.05)
    path = checkpoint("one")
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "start", start_silently)
        fleet = await InProcessFleet(tmp_path / "journal", [StageSpec("a", path)], heal=False).__aenter__()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(fleet)
        await fleet.until(lambda stages: stages[0].routable)
        await lay_down(fleet, "a")
        (Path(path) / "weights.txt").write_text("two")
        fleet.specs.append(StageSpec("b", path))
        await fleet.start_stage(fleet.specs[1])
        await fleet.until(lambda stages: stages[-1].state == common.STAGE_STATE_STALE)
        await wake(fleet, "a")
        assert fleet.stage("b").state == common.STAGE_STATE_STALE


async def test_what_could_not_be_verified_is_not_written(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = checkpoint("one")
    async with InProcessFleet(tmp_path / "journal", [StageSpec("a", path)]) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        fleet.specs.append(StageSpec("b", path, options={"opaque": "said"}))
        await fleet.start_stage(fleet.specs[1])
        await fleet.until(lambda stages: stages[1].state == common.STAGE_STATE_STALE)
        error = await refusal(fleet.stub.HealStage(HealStageRequest(slots=["b"])))
        assert error.reason is Reason.UNHEALABLE
        assert "a heal of b could not be verified: its engine gives one answer for all ranks" in error.message
        await fleet.until(lambda _: fleet.stage("b").unhealable)
        assert fleet.stage("b").state == common.STAGE_STATE_STALE


async def lose_all_sources_and_heal_by_hand(fleet: InProcessFleet) -> None:
    """Publish a version without a checkpoint, restart both stages, and switch to heals by hand."""
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "sent")
    await commit(fleet, plan, digest("sent"))
    for slot in ("a", "b"):
        await restart(fleet, slot)
    await fleet.until(lambda stages: all(stage.unhealable for stage in stages))
    await fleet.stub.SetHealing(SetHealingRequest(model="actor", by_hand=True))


async def test_a_stage_of_a_model_that_is_healed_by_hand_keeps_no_cause_and_no_time_of_an_earlier_plan(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(a=1, b=2, graces=Graces(heal_s=60.0)) as fleet:
        await lose_all_sources_and_heal_by_hand(fleet)
        assert all(fleet.stage(slot).unhealable for slot in "ab"), "no source has appeared"
        await from_disk(fleet, checkpoint("two"), "two")
        await fleet.until(lambda stages: all(stage.routable for stage in stages))
        await fleet.until(lambda stages: not any(stage.unhealable for stage in stages))
        await fleet.stub.SetHealing(SetHealingRequest(model="actor"))
        await dirty(fleet)
        await fleet.until(lambda stages: all(stage.HasField("heal_time") for stage in stages))
        await fleet.stub.SetHealing(SetHealingRequest(model="actor", by_hand=True))
        assert not any(fleet.stage(slot).HasField("heal_time") for slot in "ab"), "no heal is planned"
        await fleet.stub.SetHealing(SetHealingRequest(model="actor"))
        await fleet.until(lambda stages: all(stage.HasField("heal_time") for stage in stages))


async def test_a_dirty_stage_without_a_heal_source_says_so_at_once_and_names_no_time(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(a=1, b=2, graces=Graces(heal_s=60.0)) as fleet:
        plan = await begin(fleet)
        await join(fleet, plan)
        await write(fleet, plan, "sent")
        await commit(fleet, plan, digest("sent"))
        await dirty(fleet)
        await fleet.until(lambda stages: all(stage.unhealable for stage in stages))
        for slot in "ab":
            assert "UNHEALABLE: version" in fleet.stage(slot).not_routable
            assert not fleet.stage(slot).HasField("heal_time"), "no heal is planned"
        await from_disk(fleet, checkpoint("two"), "two")
        await fleet.until(lambda stages: all(stage.routable and not stage.unhealable for stage in stages))


async def test_a_stage_of_a_model_that_is_healed_by_hand_is_unhealable_until_a_source_appears(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(engine: FakeEngine, setup: Any) -> Any:
        info = await started(engine, setup)
        info.layout.store_host, info.layout.store_port = "127.0.0.1", 1
        return info

    started = FakeEngine.start
    monkeypatch.setattr(FakeEngine, "start", start)
    monkeypatch.setattr(FakeEngine, "send_weights", FakeEngine.flush_cache, raising=False)
    async with make_fleet(a=1, b=1, graces=Graces(heal_s=60.0)) as fleet:
        await lose_all_sources_and_heal_by_hand(fleet)
        request = HealStageRequest(slots=["a"], checkpoint=checkpoint("sent"))
        assert (await fleet.stub.HealStage(request)).state == OPERATION_STATE_OK
        await fleet.until(lambda _: not fleet.stage("b").unhealable)
        assert fleet.stage("b").state == common.STAGE_STATE_STALE, "the other stage can send the version"


async def test_a_witness_that_is_found_damaged_says_nothing_about_the_version(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(a=1, b=1, c=1, heal=False) as fleet:
        plan = await begin(fleet, "two", options=v.UpdateOptions(verify=common.VERIFICATION_LEVEL_NONE))
        await join(fleet, plan)
        await write(fleet, plan, "two")
        await commit(fleet, plan)
        assert (await fleet.stub.CheckWeights(v.CheckWeightsRequest())).state == OPERATION_STATE_OK
        damaged = next(slot for slot in fleet.server.coordinator.roster.slots if slot != "b")  # the first to be asked
        fleet.stages[damaged]._engine.weights = "another's"  # type: ignore[attr-defined]
        await restart(fleet, "b")
        await fleet.until(lambda _: fleet.stage("b").incarnation == 2)
        await fleet.until(lambda _: fleet.stage("b").state == common.STAGE_STATE_STALE)
        request = HealStageRequest(slots=["b"], checkpoint=checkpoint("two"))
        assert (await fleet.stub.HealStage(request)).state == OPERATION_STATE_OK
        assert fleet.stage("b").routable
        assert (fleet.stage(damaged).state, fleet.stage(damaged).routable) == (common.STAGE_STATE_DIRTY, False)


async def test_an_update_does_not_wait_for_the_rest_of_a_heal_of_several_stages(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.coordinator.healing.healer.MAKE_WAY_S", 2.0)
    async with make_fleet(heal=False, a=1, b=2) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        await dirty(fleet)
        preparing, going_on = asyncio.Event(), asyncio.Event()

        async def wait(engine: FakeEngine, name: str, call: Call) -> None:
            if name == "prepare_update" and engine.config.tp_size == 2:
                await going_on.wait()
            preparing.set()

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
        healing = asyncio.ensure_future(fleet.stub.HealStage(HealStageRequest()))
        await preparing.wait()
        await begin(fleet, "three")
        going_on.set()
        healed = await healing
        assert [(r.slot, r.error.reason) for r in healed.stage_results] == [("a", "CANCELLED"), ("b", "CANCELLED")]


async def test_an_update_goes_before_a_heal_that_is_just_being_accepted(
    fleet: InProcessFleet, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    await from_disk(fleet, checkpoint("two"), "two")
    accepting, going_on = asyncio.Event(), asyncio.Event()
    write_down = SqliteJournal.write

    async def slowly(self: SqliteJournal, changes: Sequence[Put | Delete]) -> None:
        records = [OperationRecord.FromString(c.body) for c in changes if isinstance(c, Put) and c.kind == "operation"]
        if not accepting.is_set() and any(record.operation.verb == "HealStage" for record in records):
            accepting.set()
            await going_on.wait()
        await write_down(self, changes)

    monkeypatch.setattr(SqliteJournal, "write", slowly)
    await restart(fleet, "a")
    await accepting.wait()
    beginning = asyncio.ensure_future(begin(fleet, "three"))
    await asyncio.wait({beginning}, timeout=0.1)
    going_on.set()
    plan = await beginning
    assert [target.slot for target in plan.targets] == ["a", "b"]
    healed = fleet.server.coordinator.operations.newest_first("HealStage", 0)[0].operation
    assert healed.error.reason == "CANCELLED"


async def test_an_update_does_not_wait_for_one_of_another_model_that_waits_for_a_heal(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(heal=False, a=1) as fleet:
        fleet.specs.append(StageSpec("critic", checkpoint("early"), model="critic"))
        await fleet.start_stage(fleet.specs[-1])
        await fleet.until(lambda stages: stages[1].routable)
        await scramble(fleet, "critic")
        preparing, going_on = asyncio.Event(), asyncio.Event()

        async def wait(engine: FakeEngine, name: str, call: Call) -> None:
            if name == "prepare_update":
                preparing.set()
                await going_on.wait()

        fake_engine.FAULTS[fleet.specs[1].model_path, 0] = wait
        healing = asyncio.ensure_future(fleet.stub.HealStage(HealStageRequest()))
        await preparing.wait()
        waiting = asyncio.ensure_future(begin(fleet, "two", model="critic"))
        await asyncio.wait({waiting}, timeout=0.1)
        async with asyncio.timeout(MAKE_WAY_S / 2):
            await begin(fleet, "three")
        assert not waiting.done()
        going_on.set()
        await waiting
        assert (await healing).error.reason == "CANCELLED"


async def test_an_update_does_not_wait_for_a_heal_that_is_at_another_model(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(heal=False, a=1, b=2) as fleet:
        fleet.specs.append(StageSpec("critic", checkpoint("early"), model="critic", frozen=True))
        await fleet.start_stage(fleet.specs[-1])
        await fleet.until(lambda stages: stages[2].routable)
        await from_disk(fleet, checkpoint("two"), "two")
        await scramble(fleet, "b", "critic")
        preparing, going_on = asyncio.Event(), asyncio.Event()

        async def wait(engine: FakeEngine, name: str, call: Call) -> None:
            if name == "prepare_update":
                preparing.set()
                await going_on.wait()

        fake_engine.FAULTS[fleet.specs[2].model_path, 0] = wait
        healing = asyncio.ensure_future(fleet.stub.HealStage(HealStageRequest()))
        await preparing.wait()
        beginning = asyncio.ensure_future(begin(fleet, "three"))
        await asyncio.wait({beginning}, timeout=0.1)
        going_on.set()
        await beginning
        healed = await healing
        assert [(r.slot, r.error.reason) for r in healed.stage_results] == [("b", ""), ("critic", "CANCELLED")]


async def test_a_stage_that_has_only_read_was_not_healed(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    """Neither its commit nor its abort is answered, nor can it be recorded that it is quarantined: none of that keeps
    the heal from saying what has become of it, beside another one that went well.
    """
    await from_disk(fleet, checkpoint("two"), "two")
    await scramble(fleet, "a", "b")
    journal = fleet.server.coordinator._journal
    write_through = journal.write

    async def silent(engine: FakeEngine, name: str, call: Call) -> None:
        if engine.config.tp_size == 1 and name in ("commit_update", "abort_update"):
            journal.write = refuse  # type: ignore[method-assign]
            raise Reason.ENGINE_FAILED.error("who knows", outcome=common.OUTCOME_UNKNOWN)

    async def refuse(changes: Sequence[Put | Delete]) -> None:
        if any((change.kind, change.key) == ("slot", "a") for change in changes):
            raise Reason.JOURNAL_FAILED.error("no space is left")
        await write_through(changes)

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = silent
    operation = await fleet.stub.HealStage(HealStageRequest(slots=["a", "b", "a"]))
    journal.write = write_through  # type: ignore[method-assign]
    assert {result.slot: result.outcome for result in operation.stage_results} == {
        "a": common.OUTCOME_UNKNOWN,
        "b": common.OUTCOME_APPLIED,
    }
    assert operation.state == OPERATION_STATE_UNKNOWN
    assert (fleet.stage("a").routable, fleet.stage("b").routable) == (False, True)
