"""Continuing what is asleep: nothing is generated before all memory is back, then without a further call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from updating import begin, commit, digest, fault, join, write
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.testing import fake_engine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, Operation

KV, WEIGHTS = common.MEMORY_TAG_KV_CACHE, common.MEMORY_TAG_WEIGHTS
ASLEEP, PAUSED, READY = common.STAGE_STATE_ASLEEP, common.STAGE_STATE_PAUSED, common.STAGE_STATE_READY
LATER = v.ContinueGenerationRequest(when_resident=True)


async def sleep(fleet: InProcessFleet, *tags: common.MemoryTag.ValueType) -> None:
    await ok(fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT)))
    await ok(fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest(tags=tags or [KV])))


async def ok(call: Any) -> Operation:
    operation: Operation = await call
    assert operation.state == OPERATION_STATE_OK, operation.error
    return operation


async def refused(fleet: InProcessFleet, request: v.ContinueGenerationRequest) -> None:
    operation = await fleet.stub.ContinueGeneration(request)
    assert (operation.state, operation.error.reason) == (OPERATION_STATE_FAILED, Reason.MEMORY_RELEASED.name)


async def resume(fleet: InProcessFleet, *slots: str) -> Operation:
    return await ok(fleet.stub.ResumeMemory(v.ResumeMemoryRequest(header=RequestHeader(target=Target(slots=slots)))))


async def digests(fleet: InProcessFleet) -> list[str]:
    checked = await ok(fleet.stub.CheckWeights(v.CheckWeightsRequest()))
    return [rank.check.model_digest for result in checked.stage_results for rank in result.rank_results]


def states(fleet: InProcessFleet) -> list[object]:
    return [fleet.stage(slot).state for slot in "ab"]


async def test_weights_that_are_kept_are_served_after_the_resume_without_an_update(fleet: InProcessFleet) -> None:
    await ok(fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT)))
    before = await digests(fleet)
    await ok(fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest(keep_weights=True)))
    assert states(fleet) == [ASLEEP, ASLEEP]
    later = await ok(fleet.stub.ContinueGeneration(LATER))
    assert {result.outcome for result in later.stage_results} == {common.OUTCOME_SKIPPED}
    await resume(fleet)
    assert states(fleet) == [READY, READY]
    assert await digests(fleet) == before


async def test_a_pause_that_was_taken_back_is_no_success_of_a_stage_that_continues_later(fleet: InProcessFleet) -> None:
    await sleep(fleet)
    await ok(fleet.stub.ContinueGeneration(LATER))
    fault(fleet, 1, 2, "pause_generation", Reason.ENGINE_FAILED.error("no"))
    paused = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    result = next(result for result in paused.stage_results if result.slot == "a")
    assert (result.outcome, result.error.reason) == (common.OUTCOME_REJECTED, "CANCELLED")
    assert "taken back, because b did not pause" in result.error.message
    fake_engine.FAULTS.clear()
    await resume(fleet)
    await fleet.until(lambda stages: stages[0].state == READY)


async def test_a_stage_refuses_to_keep_weights_that_its_engine_does_not_keep(fleet: InProcessFleet) -> None:
    """Also where its coordinator has not asked for its capabilities."""
    await ok(fleet.stub.PauseGeneration(v.PauseGenerationRequest()))
    fleet.stages["b"]._stage.registration.capabilities.keeps_weights = False
    operation = await fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest(keep_weights=True))
    outcomes = {result.slot: (result.outcome, result.error.reason) for result in operation.stage_results}
    assert outcomes == {"a": (common.OUTCOME_APPLIED, ""), "b": (common.OUTCOME_SKIPPED, "UNSUPPORTED")}
    assert states(fleet) == [ASLEEP, PAUSED]


async def test_what_is_asleep_goes_on_with_the_resume(fleet: InProcessFleet) -> None:
    await sleep(fleet)
    later = await ok(fleet.stub.ContinueGeneration(LATER))
    assert {result.outcome for result in later.stage_results} == {common.OUTCOME_SKIPPED}
    assert [len(result.rank_results) for result in later.stage_results] == [1, 2]
    assert {result.error.reason for result in later.stage_results} == {"MEMORY_RELEASED"}
    assert states(fleet) == [ASLEEP, ASLEEP]
    woken = await resume(fleet, "a")
    assert states(fleet) == [READY, ASLEEP]
    assert [rank.outcome for rank in woken.stage_results[0].rank_results] == [common.OUTCOME_APPLIED]
    await resume(fleet)
    assert states(fleet) == [READY, READY]


async def test_a_pause_by_name_takes_it_back(fleet: InProcessFleet) -> None:
    await sleep(fleet)
    await ok(fleet.stub.ContinueGeneration(LATER))
    await ok(fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT)))
    await resume(fleet)
    assert states(fleet) == [PAUSED, PAUSED]
    await ok(fleet.stub.ContinueGeneration(LATER))
    assert states(fleet) == [READY, READY]


async def test_without_whole_weights_it_is_refused_at_once(fleet: InProcessFleet) -> None:
    await sleep(fleet, WEIGHTS, KV)
    await refused(fleet, LATER)
    await ok(fleet.stub.ResumeMemory(v.ResumeMemoryRequest(tags=[WEIGHTS])))
    await refused(fleet, LATER)
    await resume(fleet)
    assert READY not in states(fleet)


async def test_it_is_refused_where_nobody_asks_for_it_later(fleet: InProcessFleet) -> None:
    await sleep(fleet)
    await refused(fleet, v.ContinueGenerationRequest())
    await resume(fleet)
    assert states(fleet) == [PAUSED, PAUSED]


async def test_a_coordinator_that_was_restarted_remembers(make_fleet: Callable[..., Any]) -> None:
    async with make_fleet(a=1) as fleet:
        await sleep(fleet)
        await ok(fleet.stub.ContinueGeneration(LATER))
        await fleet.channel.close()
        await fleet.server.stop()
        await fleet.start_coordinator(fleet.server.address)
        await eventually(lambda: fleet.stage("a").state == ASLEEP)
        await resume(fleet)
        assert fleet.stage("a").state == READY


async def test_one_that_was_resumed_when_the_coordinator_died_is_let_go_on(make_fleet: Callable[..., Any]) -> None:
    async with make_fleet(a=1) as fleet:
        await sleep(fleet)
        await ok(fleet.stub.ContinueGeneration(LATER))
        slot = fleet.server.coordinator.roster.slot("a")
        # The resume as it is when the coordinator dies after its first step.
        await fleet.server.coordinator.updates._context.fanout.run(
            v.ResumeMemoryRequest(), [slot], operation_id="cut", step="1", deadline=time.monotonic() + 10
        )
        await eventually(lambda: fleet.stage("a").state == READY)
        # Once: a pause that somebody asks for later is theirs.
        await eventually(lambda: not slot.record.continue_when_resident)


async def test_an_update_whose_stages_stay_paused_takes_it_back(fleet: InProcessFleet) -> None:
    await sleep(fleet)
    await ok(fleet.stub.ContinueGeneration(LATER))
    plan = await begin(fleet, options=v.UpdateOptions(after=v.AFTER_UPDATE_STAY_PAUSED))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    await ok(commit(fleet, plan, digest("w1")))
    await resume(fleet)
    assert states(fleet) == [PAUSED, PAUSED]


async def test_a_resume_whose_stage_does_not_continue_keeps_the_report_of_the_memory(fleet: InProcessFleet) -> None:
    await sleep(fleet)
    await ok(fleet.stub.ContinueGeneration(LATER))
    fault(fleet, 0, 1, "continue_generation", Reason.ENGINE_FAILED.error("stuck"))
    resumed = await fleet.stub.ResumeMemory(v.ResumeMemoryRequest())
    of_a, of_b = resumed.stage_results
    assert (of_a.outcome, of_b.outcome) == (common.OUTCOME_REJECTED, common.OUTCOME_APPLIED)
    assert of_a.error.message == "memory was resumed; the stage did not continue generation: stuck"
    assert all(rank.HasField("memory") for result in (of_a, of_b) for rank in result.rank_results)
    fake_engine.FAULTS.clear()
    await resume(fleet)
    assert states(fleet) == [READY, READY]
