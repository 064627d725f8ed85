"""A pause by name is the fleet's: what comes, or comes back, is paused before it may serve; a continue ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from fleet_steps import cut_off, kill, load, on_record, restart_coordinator
from google.protobuf.timestamp_pb2 import Timestamp
from journal_faults import full_disk
from updating import begin, commit, digest, fault, from_disk, join, refusal, restart, write
from waiting import eventually

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.fleet.roster import ABSENT
from rlctl.coordinator.pauses import pause as pausing
from rlctl.coordinator.pauses import pause_expiry as lifting
from rlctl.engine import Call, EngineConfig, EngineInfo
from rlctl.ports import Delete, Put, SystemClock
from rlctl.stage.server import StageConfig, StageServer
from rlctl.stage.state_machine import Stage
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2 as c
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.fleet_pb2 import Pause
from rlctl.v1.journal_pb2 import SlotRecord
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_CANCELLED,
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_PARTIAL,
    Operation,
)

PAUSED, READY, UNREACHABLE = (
    common.STAGE_STATE_PAUSED,
    common.STAGE_STATE_READY,
    common.STAGE_STATE_UNREACHABLE,
)
RETRACT = common.PAUSE_MODE_RETRACT


@pytest.fixture
async def fleet(make_fleet: Callable[..., Any]) -> AsyncIterator[InProcessFleet]:
    """Stages a and b, which are killed and started again."""
    async with make_fleet(a=1, b=1) as fleet:
        yield fleet


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Slots of which the gate has been open at any change since the set was cleared."""
    open_: set[str] = set()
    changed = Stage._changed

    def look(self: Stage, **how: bool) -> None:
        changed(self, **how)
        try:
            self.serving.refuse(self._clock)
        except RlctlError:
            return
        open_.add(self.registration.slot)

    monkeypatch.setattr(Stage, "_changed", look)
    return open_


async def pause(fleet: InProcessFleet, *slots: str, **fields: Any) -> Operation:
    header = RequestHeader(target=Target(slots=slots))
    operation: Operation = await fleet.stub.PauseGeneration(
        v.PauseGenerationRequest(header=header, mode=RETRACT, **fields)
    )
    assert operation.state == OPERATION_STATE_OK, operation.error
    return operation


async def go_on(fleet: InProcessFleet, *slots: str) -> Operation:
    header = RequestHeader(target=Target(slots=slots))
    operation: Operation = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(header=header))
    assert operation.state == OPERATION_STATE_OK, operation.error
    return operation


async def paused_for_good(fleet: InProcessFleet, *slots: str) -> None:
    def are() -> bool:
        there = fleet.server.coordinator.roster.fleet().stages
        stages = [stage for stage in there if stage.registration.slot in slots]
        return len(stages) == len(slots) and all(
            s.state == PAUSED and not s.report.paused_by_update and not s.routable for s in stages
        )

    await eventually(are)


async def test_an_engine_that_is_killed_after_a_pause_of_all_comes_back_paused(
    fleet: InProcessFleet, served: set[str]
) -> None:
    operation = await pause(fleet, by="ops@host", reason="maintenance")
    spec = await kill(fleet, "a")
    served.clear()
    await fleet.start_stage(spec)
    await paused_for_good(fleet, "a", "b")
    kept = fleet.stage("a").pause
    assert (kept.operation_id, kept.mode) == (operation.operation_id, RETRACT)
    assert (kept.by, kept.reason, kept.since) == ("ops@host", "maintenance", operation.create_time)
    assert served == set()
    await go_on(fleet)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    assert not fleet.stage("a").HasField("pause")
    assert on_record(fleet) == []


async def test_an_engine_that_was_not_there_is_paused_when_it_comes_back(
    fleet: InProcessFleet, served: set[str]
) -> None:
    spec = await kill(fleet, "a")
    operation = await pause(fleet)
    assert [(each.slot, each.reason) for each in operation.excluded] == [("a", pausing.PAUSED_LATER)]
    served.clear()
    await fleet.start_stage(spec)
    await paused_for_good(fleet, "a", "b")
    assert served == set()


async def test_an_engine_that_joins_without_the_mode_of_the_pause_is_paused_in_another(
    fleet: InProcessFleet, served: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await pause(fleet)
    start = FakeEngine.start

    async def without_retract(engine: FakeEngine, setup: Mapping[str, str]) -> EngineInfo:
        info = await start(engine, setup)
        info.capabilities.pause_modes[:] = [common.PAUSE_MODE_ABORT]
        return info

    monkeypatch.setattr(FakeEngine, "start", without_retract)
    served.clear()
    fleet.specs.append(StageSpec("new", fleet.specs[0].model_path))
    await fleet.start_stage(fleet.specs[-1])
    await paused_for_good(fleet, "new")
    assert fleet.stage("new").report.pause_mode == common.PAUSE_MODE_ABORT
    assert served == set()
    await go_on(fleet)
    await fleet.until(lambda stages: len(stages) == 3 and all(stage.routable for stage in stages))


async def test_an_engine_that_joins_for_the_first_time_is_paused(fleet: InProcessFleet, served: set[str]) -> None:
    await pause(fleet)
    served.clear()
    spec = StageSpec("new", fleet.specs[0].model_path)
    fleet.specs.append(spec)
    await fleet.start_stage(spec)
    await paused_for_good(fleet, "new")
    assert served == set()


async def test_a_pause_of_one_slot_is_that_slots_alone(fleet: InProcessFleet, served: set[str]) -> None:
    await pause(fleet, "a")
    for slot in ("a", "b"):
        await fleet.start_stage(await kill(fleet, slot))
    await paused_for_good(fleet, "a")
    await fleet.until(lambda _: fleet.stage("b").routable)


async def test_one_that_is_cut_off_stops_before_a_pause_of_all_is_ok_and_is_paused_when_it_is_back(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, served: set[str]
) -> None:
    async with make_fleet(a=1, b=1, lease_s=1.5) as fleet:
        comes_back = await cut_off(fleet, "a", monkeypatch)
        stage = fleet.stages["a"]._stage
        stage.serving.refuse(stage._clock)  # it has a lease still
        await pause(fleet)
        with pytest.raises(RlctlError, match="no serving lease"):
            stage.serving.refuse(stage._clock)
        served.clear()
        comes_back()
        await paused_for_good(fleet, "a")
        assert served == set()


async def test_a_pause_that_cannot_wait_for_one_that_is_cut_off_is_taken_back(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_fleet(a=1, b=1, lease_s=60.0) as fleet:
        comes_back = await cut_off(fleet, "a", monkeypatch)
        request = v.PauseGenerationRequest()
        request.header.timeout.FromMilliseconds(300)
        operation = await fleet.stub.PauseGeneration(request)
        assert (operation.state, operation.error.reason) == (OPERATION_STATE_FAILED, "DEADLINE_EXCEEDED")
        assert operation.error.message.startswith("a was not paused: it has no link")
        assert on_record(fleet) == []
        comes_back()
        await fleet.until(lambda stages: all(stage.routable for stage in stages))


async def test_a_pause_that_a_target_refuses_is_kept_by_nobody(fleet: InProcessFleet) -> None:
    await pause(fleet, "a")
    before = on_record(fleet)
    refusing = fleet.stages["b"]._engine

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if engine is refusing and name == "pause_generation":
            raise Reason.ENGINE_FAILED.error("no pause")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert operation.state == OPERATION_STATE_PARTIAL, "a was paused already"
    assert on_record(fleet) == before
    assert fleet.stage("a").state == PAUSED
    fake_engine.FAULTS.clear()
    await fleet.start_stage(await kill(fleet, "b"))
    await fleet.until(lambda _: fleet.stage("b").routable)


@pytest.mark.parametrize("failure", ["a target refuses", "the disk is full"])
async def test_a_failed_pause_does_not_say_that_an_absent_stage_is_paused_later(
    fleet: InProcessFleet, failure: str
) -> None:
    spec = await kill(fleet, "a")

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "pause_generation":
            raise Reason.ENGINE_FAILED.error("no pause")

    if failure == "the disk is full":
        async with full_disk(fleet, "pause"):
            operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    else:
        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
        operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
        fake_engine.FAULTS.clear()
    assert operation.state == OPERATION_STATE_FAILED
    assert [(each.slot, each.reason) for each in operation.excluded] == [("a", ABSENT)]
    await fleet.start_stage(spec)
    await fleet.until(lambda _: fleet.stage("a").routable)


async def test_a_pause_outlives_the_coordinator(fleet: InProcessFleet, served: set[str]) -> None:
    await pause(fleet)
    spec = await kill(fleet, "a")
    await restart_coordinator(fleet)
    served.clear()
    await fleet.start_stage(spec)
    await paused_for_good(fleet, "a", "b")
    assert served == set()
    await go_on(fleet)
    await restart_coordinator(fleet)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))


async def test_one_that_is_healed_under_a_pause_stays_paused(
    fleet: InProcessFleet, served: set[str], checkpoint: Callable[[str], str]
) -> None:
    update = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
    assert (await fleet.stub.UpdateWeightsFromDisk(update)).state == OPERATION_STATE_OK
    await pause(fleet)
    spec = await kill(fleet, "a")
    served.clear()
    await fleet.start_stage(spec)
    await paused_for_good(fleet, "a")
    assert fleet.stage("a").report.weight_version.sequence == 2
    assert served == set()


async def test_an_update_under_a_pause_lets_nothing_go_on(make_fleet: Callable[..., Any], served: set[str]) -> None:
    async with make_fleet(a=1, b=1, lease_s=1.5) as fleet:
        await pause(fleet)
        await fleet.start_stage(await kill(fleet, "a"))
        await paused_for_good(fleet, "a")
        served.clear()
        plan = await begin(fleet, options=v.UpdateOptions(pause=RETRACT))
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK
        await paused_for_good(fleet, "a", "b")
        assert served == set()


async def test_what_an_update_leaves_paused_is_kept_like_a_pause_by_name(
    fleet: InProcessFleet, served: set[str]
) -> None:
    plan = await begin(fleet, options=v.UpdateOptions(pause=RETRACT, after=v.AFTER_UPDATE_STAY_PAUSED))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK
    assert (fleet.stage("a").pause.operation_id, fleet.stage("a").pause.by) == (plan.update_id, "trainer")
    spec = await kill(fleet, "a")
    served.clear()
    await fleet.start_stage(spec)
    await paused_for_good(fleet, "b")
    await eventually(lambda: fleet.stage("a").report.paused)
    assert served == set()


async def test_a_continue_reaches_one_that_was_cut_off_when_it_is_back(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pause(fleet)
    comes_back = await cut_off(fleet, "a", monkeypatch)
    await go_on(fleet)
    assert fleet.stage("b").routable
    comes_back()
    await fleet.until(lambda _: fleet.stage("a").routable)


async def test_a_continue_ends_no_pause_that_began_after_it(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    comes_back = await cut_off(fleet, "a", monkeypatch)
    going = asyncio.Event()

    async def wait(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "continue_generation":
            await going.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
    continuing = asyncio.create_task(go_on(fleet))
    slots = fleet.server.coordinator.roster.slots
    await eventually(lambda: slots["b"].in_hand[""] == 1)
    comes_back()
    await fleet.until(lambda _: fleet.stage("a").routable)
    newer = await pause(fleet, "a")
    going.set()
    await continuing
    assert on_record(fleet) == [newer.operation_id]
    await paused_for_good(fleet, "a")


@pytest.mark.parametrize("earlier", ["pause_generation", "continue_generation"])
async def test_a_pause_holds_for_a_stage_that_returns_with_an_earlier_operation_under_way(
    make_fleet: Callable[..., Any],
    served: set[str],
    monkeypatch: pytest.MonkeyPatch,
    earlier: str,
) -> None:
    """The pause does not address the stage, which had no link."""
    async with make_fleet(a=1, b=1, lease_s=1.5) as fleet:
        if earlier == "continue_generation":
            await pause(fleet)
        running, may_run = asyncio.Event(), asyncio.Event()

        async def wait(engine: FakeEngine, name: str, call: Call) -> None:
            if name == earlier:
                running.set()
                await may_run.wait()

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
        first = asyncio.create_task((pause if earlier == "pause_generation" else go_on)(fleet, "a"))
        await running.wait()
        fake_engine.FAULTS.clear()
        comes_back = await cut_off(fleet, "a", monkeypatch)
        newer = asyncio.create_task(pause(fleet))
        newer.add_done_callback(lambda _: served.clear())
        await eventually(lambda: fleet.stage("a").pause == fleet.stage("b").pause != Pause())
        comes_back()
        await fleet.until(lambda _: fleet.stage("a").state != UNREACHABLE)
        await asyncio.wait([newer], timeout=5.0)
        may_run.set()
        await first
        assert [each.slot for each in (await newer).excluded] == ["a"]
        await paused_for_good(fleet, "a", "b")
        assert served == set()


@pytest.mark.parametrize("adapter", ["", "math"])
async def test_a_pause_that_a_continue_ends_while_it_runs_is_not_ok(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    """The continue does not address a stage without a link, so it does not wait for the pause."""
    async with make_fleet(a=1, b=1, lease_s=1.5) as fleet:
        if adapter:
            await load(fleet, checkpoint("lora"))
        pausing_now, may_pause = asyncio.Event(), asyncio.Event()

        async def wait(engine: FakeEngine, name: str, call: Call) -> None:
            if name == "pause_generation":
                pausing_now.set()
                await may_pause.wait()

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
        header = RequestHeader(target=Target(slots=["a"]))
        request = v.PauseGenerationRequest(header=header, mode=RETRACT, adapter=adapter)
        paused = asyncio.ensure_future(fleet.stub.PauseGeneration(request))
        await pausing_now.wait()
        comes_back = await cut_off(fleet, "a", monkeypatch)
        continued = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(adapter=adapter))
        assert [each.slot for each in continued.excluded] == ["a"]
        comes_back()
        may_pause.set()
        operation = await paused
        assert (operation.state, on_record(fleet)) == (OPERATION_STATE_CANCELLED, [])
        [result] = operation.stage_results
        assert (result.outcome, result.error.reason) == (common.OUTCOME_REJECTED, "CANCELLED")
        assert "ContinueGeneration" in result.error.message
        await fleet.until(lambda _: fleet.stage("a").routable)


@pytest.mark.parametrize("before", ["continue first", "pause first"])
@pytest.mark.parametrize("adapter", ["", "math"])
async def test_a_continue_also_ends_the_pause_that_a_failing_pause_had_replaced(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, adapter: str, before: str
) -> None:
    """The newer pause of stage a is taken back at its end. The continue of all does not address a."""
    await load(fleet, checkpoint("lora"))
    await pause(fleet, "a", adapter=adapter)
    pausing_now, may_pause, may_go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "pause_generation":
            pausing_now.set()
            await may_pause.wait()
            raise Reason.ENGINE_FAILED.error("no pause")
        if name == "continue_generation":
            await may_go_on.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
    header = RequestHeader(target=Target(slots=["a"]))
    request = v.PauseGenerationRequest(header=header, mode=RETRACT, adapter=adapter)
    newer = asyncio.ensure_future(fleet.stub.PauseGeneration(request))
    await pausing_now.wait()
    comes_back = await cut_off(fleet, "a", monkeypatch)
    going = asyncio.ensure_future(fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(adapter=adapter)))
    slots = fleet.server.coordinator.roster.slots
    await eventually(lambda: slots["b"].in_hand[adapter] == 1)
    if before == "continue first":
        may_go_on.set()
        await going
    comes_back()
    may_pause.set()
    assert (await newer).state == OPERATION_STATE_FAILED
    fake_engine.FAULTS.clear()
    may_go_on.set()
    await going
    assert on_record(fleet) == []
    fleet.server.coordinator.updates.look_after_all(header.target)  # which else is done every 10 s
    await fleet.until(lambda _: fleet.stage("a").routable and not fleet.stage("a").report.paused_adapters)


async def test_a_continue_of_one_slot_leaves_the_pause_in_force_for_the_others(
    fleet: InProcessFleet, served: set[str]
) -> None:
    await pause(fleet)
    await go_on(fleet, "a")
    for slot in ("a", "b"):
        await fleet.start_stage(await kill(fleet, slot))
    await fleet.until(lambda _: fleet.stage("a").routable)
    await paused_for_good(fleet, "b")
    await go_on(fleet)
    assert on_record(fleet) == []


async def test_a_stage_of_another_model_in_a_continued_slot_is_paused(fleet: InProcessFleet, served: set[str]) -> None:
    operation = await pause(fleet)
    actors = RequestHeader(target=Target(model="actor", slots=["a"]))
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(header=actors))
    spec = await kill(fleet, "a")
    await restart_coordinator(fleet)
    served.clear()
    await fleet.start_stage(replace(spec, model="critic"))
    await fleet.until(lambda _: fleet.stage("a").registration.model == "critic")
    await paused_for_good(fleet, "a", "b")
    assert fleet.stage("a").pause.operation_id == operation.operation_id
    assert served == set()
    await go_on(fleet)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))


async def test_a_continue_that_is_refused_ends_no_pause(fleet: InProcessFleet, served: set[str]) -> None:
    await pause(fleet)
    sleep = v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_KV_CACHE])
    assert (await fleet.stub.ReleaseMemory(sleep)).state == OPERATION_STATE_OK
    refused = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert (refused.state, refused.error.reason) == (OPERATION_STATE_FAILED, "MEMORY_RELEASED")
    spec = await kill(fleet, "a")
    served.clear()
    await fleet.start_stage(spec)
    await paused_for_good(fleet, "a")
    assert served == set()


@pytest.mark.parametrize("adapter", ["", "math"])
async def test_what_a_continue_leaves_of_the_pause_of_a_model_covers_no_other_model(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], adapter: str
) -> None:
    """Stage a refuses the continue. A stage of another model fills its slot, then one of the paused model."""
    await load(fleet, checkpoint("lora"))
    actors = RequestHeader(target=Target(model="actor"))
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=actors, mode=RETRACT, adapter=adapter))
    refusing = fleet.stages["a"]._engine

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if engine is refusing and name == "continue_generation":
            raise Reason.ENGINE_FAILED.error("no continue")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
    continued = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(header=actors, adapter=adapter))
    assert continued.state == OPERATION_STATE_PARTIAL
    spec = await kill(fleet, "a")

    def kept() -> list[str]:
        stage = fleet.stage("a")
        return [each.adapter for each in ([stage.pause] if stage.HasField("pause") else stage.adapter_pauses)]

    assert kept() == [adapter]
    await fleet.start_stage(replace(spec, model="critic"))
    await fleet.until(lambda _: fleet.stage("a").registration.model == "critic" and fleet.stage("a").routable)
    assert kept() == []
    await kill(fleet, "a")
    await restart_coordinator(fleet)
    await fleet.start_stage(spec)
    await fleet.until(lambda _: fleet.stage("a").registration.model == "actor")
    assert kept() == [adapter]
    if not adapter:
        await paused_for_good(fleet, "a")


async def test_a_pause_that_is_due_is_not_served_while_the_engine_refuses_it(
    fleet: InProcessFleet, served: set[str]
) -> None:
    await pause(fleet)
    spec = await kill(fleet, "a")

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "pause_generation":
            raise Reason.ENGINE_FAILED.error("not now")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
    served.clear()
    await fleet.start_stage(spec)
    await eventually(lambda: fleet.stage("a").state == READY)
    await asyncio.sleep(0.5)
    assert not fleet.stage("a").routable
    assert served == set()
    fake_engine.FAULTS.clear()
    await paused_for_good(fleet, "a")


async def test_an_engine_that_refuses_a_pause_serves_nothing_while_a_newer_one_runs(
    fleet: InProcessFleet, served: set[str]
) -> None:
    older = await pause(fleet)
    spec = await kill(fleet, "a")
    running, may_run = asyncio.Event(), asyncio.Event()

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "pause_generation":
            running.set()
            await may_run.wait()
            raise Reason.ENGINE_FAILED.error("not now")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
    served.clear()
    await fleet.start_stage(spec)
    await running.wait()
    slot = fleet.server.coordinator.roster.slots["a"]
    header = RequestHeader(target=Target(slots=["a"]))
    newer = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header)))
    await eventually(lambda: len(on_record(fleet)) == 2 and slot.in_hand[""])
    number = fleet.server.coordinator._peers.grant(slot, confirm=True)
    await eventually(lambda: slot.report.grant_number >= number)
    may_run.set()
    assert (await newer).state == OPERATION_STATE_FAILED
    assert on_record(fleet) == [older.operation_id]
    fake_engine.FAULTS.clear()
    await paused_for_good(fleet, "a")
    assert served == set()


async def test_a_stage_that_is_adopted_under_a_pause_is_paused(
    make_fleet: Callable[..., Any], served: set[str], checkpoint: Callable[[str], str]
) -> None:
    """As embedded coordinators take charge of stage servers that know none."""
    alone = StageServer(StageConfig("z", "actor", "fake", EngineConfig(checkpoint("one"))))
    await alone.start()
    try:
        async with make_fleet(a=1) as fleet:
            await pause(fleet)
            served.clear()
            await fleet.server.coordinator.adopt(alone.address)
            await paused_for_good(fleet, "z")
            assert served == set()
    finally:
        await alone.stop()


async def test_who_and_why_are_printable(fleet: InProcessFleet) -> None:
    for wrong in ({"by": "a\nb"}, {"by": "x" * 201}, {"reason": "\x1b[0m"}):
        error = await refusal(fleet.stub.PauseGeneration(v.PauseGenerationRequest(**wrong)))
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, next(iter(wrong)))


async def test_a_pause_says_what_it_would_do_and_keeps_nothing(fleet: InProcessFleet) -> None:
    request = v.PauseGenerationRequest(header=RequestHeader(validate_only=True))
    assert (await fleet.stub.PauseGeneration(request)).validate_only
    assert on_record(fleet) == []
    assert (await fleet.stub.GetFleet(c.GetFleetRequest())).stages[0].routable


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifting, "LOOK_S", 0.05)


@pytest.mark.usefixtures("often")
async def test_a_pause_with_an_end_is_lifted_by_itself(fleet: InProcessFleet) -> None:
    operation = await pause(fleet, ttl=duration(1))
    kept = fleet.stage("a").pause
    assert kept.until.ToNanoseconds() - operation.create_time.ToNanoseconds() == 1_000_000_000
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    await eventually(lambda: on_record(fleet) == [])
    (lifting, *_) = (await fleet.stub.ListOperations(c.ListOperationsRequest(verb="ContinueGeneration"))).operations
    async for lifted in fleet.stub.WatchOperation(c.WatchOperationRequest(operation_id=lifting.operation_id)):
        ended = lifted
    assert ended.state == OPERATION_STATE_OK


@pytest.fixture
def set_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the wall clock ahead by seconds."""
    wall, ahead_s = SystemClock.wall, 0

    def shifted(clock: SystemClock) -> Timestamp:
        time = wall(clock)
        return Timestamp(seconds=time.seconds + ahead_s, nanos=time.nanos)

    def ahead(seconds: int) -> None:
        nonlocal ahead_s
        ahead_s = seconds

    monkeypatch.setattr(SystemClock, "wall", shifted)
    return ahead


@pytest.mark.usefixtures("often")
async def test_a_wall_clock_that_is_set_ends_no_pause_sooner_or_later(
    fleet: InProcessFleet, set_ahead: Callable[[int], None]
) -> None:
    kept = await pause(fleet, ttl=duration(3600))
    await asyncio.sleep(0.2)
    set_ahead(7200)
    await asyncio.sleep(0.3)
    assert on_record(fleet) == [kept.operation_id]
    await go_on(fleet)
    await pause(fleet, ttl=duration(1))
    await asyncio.sleep(0.2)
    set_ahead(0)
    await eventually(lambda: on_record(fleet) == [])


@pytest.mark.usefixtures("often")
async def test_a_coordinator_restarted_at_an_earlier_wall_time_keeps_no_pause_beyond_its_ttl(
    fleet: InProcessFleet, set_ahead: Callable[[int], None]
) -> None:
    await pause(fleet, ttl=duration(1))
    set_ahead(-7200)
    await restart_coordinator(fleet)
    await eventually(lambda: on_record(fleet) == [])


@pytest.mark.usefixtures("often")
async def test_the_end_of_a_pause_ends_no_newer_one(fleet: InProcessFleet) -> None:
    await pause(fleet, ttl=duration(1))
    newer = await pause(fleet, "a")
    await fleet.until(lambda _: fleet.stage("b").routable)
    await eventually(lambda: on_record(fleet) == [newer.operation_id])
    await paused_for_good(fleet, "a")
    fleet.specs.append(StageSpec("new", fleet.specs[0].model_path))
    await fleet.start_stage(fleet.specs[-1])
    await fleet.until(lambda _: fleet.stage("new").routable)


@pytest.mark.usefixtures("often")
async def test_the_end_of_a_pause_outlives_the_coordinator_and_stages_that_are_not_there(fleet: InProcessFleet) -> None:
    await pause(fleet, ttl=duration(2))
    specs = [await kill(fleet, slot) for slot in ("a", "b")]
    await restart_coordinator(fleet)
    assert len(on_record(fleet)) == 1
    await eventually(lambda: on_record(fleet) == [])
    for spec in specs:
        await fleet.start_stage(spec)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))


async def test_an_end_that_is_none_is_refused(fleet: InProcessFleet) -> None:
    for ttl in (0, -1, 10**9):
        error = await refusal(fleet.stub.PauseGeneration(v.PauseGenerationRequest(ttl=duration(ttl))))
        assert (error.reason, error.field) == (Reason.DEADLINE_INVALID, "ttl")
    header = RequestHeader(fence=common.Fence(update_id="u"))
    error = await refusal(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header, ttl=duration(1))))
    assert (error.reason, error.field) == (Reason.FIELD_CONFLICT, "ttl")
    assert on_record(fleet) == []


async def continues(fleet: InProcessFleet) -> list[Operation]:
    answer = await fleet.stub.ListOperations(c.ListOperationsRequest(verb="ContinueGeneration"))
    return list(answer.operations)


def refuse_pauses(fleet: InProcessFleet, slot: str) -> asyncio.Event:
    """Have an engine refuse pauses, once the returned event is set."""
    refusing, may = fleet.stages[slot]._engine, asyncio.Event()

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if engine is refusing and name == "pause_generation":
            await may.wait()
            raise Reason.ENGINE_FAILED.error("no pause")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
    return may


@pytest.mark.usefixtures("often")
async def test_the_end_of_a_pause_waits_for_one_that_is_asleep(fleet: InProcessFleet) -> None:
    await pause(fleet, ttl=duration(1))
    sleep = v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_KV_CACHE])
    assert (await fleet.stub.ReleaseMemory(sleep)).state == OPERATION_STATE_OK
    await eventually(lambda: on_record(fleet) == [])
    assert await continues(fleet) == [], "nothing could be continued"
    assert (await fleet.stub.ResumeMemory(v.ResumeMemoryRequest())).state == OPERATION_STATE_OK
    await fleet.until(lambda stages: all(stage.routable for stage in stages))


@pytest.mark.usefixtures("often")
async def test_the_end_of_a_pause_of_a_slot_that_is_empty_makes_no_operations(fleet: InProcessFleet) -> None:
    await pause(fleet, "a", ttl=duration(1))
    spec = await kill(fleet, "a")
    await eventually(lambda: on_record(fleet) == [])
    assert await continues(fleet) == []
    await fleet.start_stage(spec)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))


@pytest.mark.usefixtures("often")
async def test_a_pause_that_cannot_be_lifted_is_tried_less_and_less_often(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifting, "AGAIN_S", (0.0, 3600.0))

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "continue_generation":
            raise Reason.ENGINE_FAILED.error("no")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
    await pause(fleet, ttl=duration(0.2))
    await eventually(lambda: len(fleet.server.coordinator._lifting._tries) == 1)
    await asyncio.sleep(1)
    assert 1 <= len(await continues(fleet)) <= 2


@pytest.mark.usefixtures("often")
async def test_the_end_of_a_pause_ends_no_older_one(fleet: InProcessFleet) -> None:
    older = await pause(fleet)
    newer = await pause(fleet, "a", ttl=duration(1))
    assert on_record(fleet) == [older.operation_id, newer.operation_id]
    await eventually(lambda: on_record(fleet) == [older.operation_id])
    assert fleet.stage("a").pause.operation_id == older.operation_id
    await paused_for_good(fleet, "a", "b")


@pytest.mark.usefixtures("often")
async def test_the_end_of_a_pause_and_what_goes_on_later_are_one_write(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pause(fleet, ttl=duration(1))
    comes_back = await cut_off(fleet, "a", monkeypatch)
    journal = fleet.server.coordinator._journal
    write, failed = journal.write, []

    async def fail_once(changes: list[Put | Delete]) -> None:
        slots = [change for change in changes if isinstance(change, Put) and change.kind == "slot"]
        if not failed and any(SlotRecord.FromString(slot.body).continue_when_resident for slot in slots):
            failed.append(len(on_record(fleet)))
            raise Reason.JOURNAL_FAILED.error("full")
        await write(changes)

    monkeypatch.setattr(journal, "write", fail_once)
    await eventually(lambda: bool(failed))
    assert failed == [1], "the pause had not ended yet"
    await eventually(lambda: on_record(fleet) == [])
    comes_back()
    await fleet.until(lambda stages: all(stage.routable for stage in stages))


async def test_one_that_was_paused_for_a_pause_that_is_taken_back_goes_on(fleet: InProcessFleet) -> None:
    may = refuse_pauses(fleet, "b")
    pausing_ = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest()))
    await eventually(lambda: len(on_record(fleet)) == 1)
    fleet.specs.append(StageSpec("new", fleet.specs[0].model_path))
    await fleet.start_stage(fleet.specs[-1])
    await paused_for_good(fleet, "new")
    may.set()
    assert (await pausing_).state == OPERATION_STATE_FAILED
    fake_engine.FAULTS.clear()
    assert on_record(fleet) == []
    await fleet.until(lambda _: fleet.stage("new").routable)


async def test_a_pause_that_is_taken_back_leaves_what_was_continued_while_asleep(fleet: InProcessFleet) -> None:
    await pause(fleet)
    header = RequestHeader(target=Target(slots=["a"]))
    sleep = v.ReleaseMemoryRequest(header=header, tags=[common.MEMORY_TAG_KV_CACHE])
    assert (await fleet.stub.ReleaseMemory(sleep)).state == OPERATION_STATE_OK
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(when_resident=True))
    refuse_pauses(fleet, "b").set()
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert on_record(fleet) == []
    fake_engine.FAULTS.clear()
    assert (await fleet.stub.ResumeMemory(v.ResumeMemoryRequest(header=header))).state == OPERATION_STATE_OK
    await fleet.until(lambda _: fleet.stage("a").routable)


async def test_a_resume_under_a_pause_lets_nothing_go_on(fleet: InProcessFleet, served: set[str]) -> None:
    await pause(fleet)
    sleep = v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_KV_CACHE])
    assert (await fleet.stub.ReleaseMemory(sleep)).state == OPERATION_STATE_OK
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(when_resident=True))
    await pause(fleet)
    served.clear()
    assert (await fleet.stub.ResumeMemory(v.ResumeMemoryRequest())).state == OPERATION_STATE_OK
    await paused_for_good(fleet, "a", "b")
    assert served == set()
    await go_on(fleet)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))


async def test_a_pause_that_was_taken_back_is_no_stages_success(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str]
) -> None:
    """Also at a stage that does not generate, and is healed afterwards."""
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        fault(fleet, 1, 2, "pause_generation", Reason.ENGINE_FAILED.error("no"))
        paused = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
        stale = next(result for result in paused.stage_results if result.slot == "a")
        assert (stale.outcome, stale.error.reason) == (common.OUTCOME_REJECTED, "CANCELLED")
        assert "taken back, because b did not pause" in stale.error.message
        assert not fleet.server.coordinator.roster.slots["a"].pause


@pytest.mark.parametrize("adapter", ["", "math"])
async def test_a_continue_whose_pause_stays_on_record_is_no_stages_success(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, adapter: str
) -> None:
    await fleet.stub.LoadAdapter(v.LoadAdapterRequest(name="math", path=checkpoint("math"), version="1"))
    paused = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(adapter=adapter))
    assert paused.state == OPERATION_STATE_OK, paused
    journal = fleet.server.coordinator._journal
    write = journal.write

    async def fail(changes: list[Put | Delete]) -> None:
        if any(change.kind == "pause" for change in changes):
            raise Reason.JOURNAL_FAILED.error("full")
        await write(changes)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "write", fail)
        continued = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(adapter=adapter))
    assert (continued.state, continued.error.reason) == (OPERATION_STATE_FAILED, "JOURNAL_FAILED")
    for result in continued.stage_results:
        assert (result.outcome, result.error.reason) == (common.OUTCOME_REJECTED, "CANCELLED")
        assert "continued, then paused again, because the pause did not end" in result.error.message
    pauses = [stage.adapter_pauses if adapter else stage.pause for stage in map(fleet.stage, "ab")]
    assert all(pauses)
    if not adapter:
        await paused_for_good(fleet, "a", "b")
    assert (
        await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(adapter=adapter))
    ).state == OPERATION_STATE_OK
