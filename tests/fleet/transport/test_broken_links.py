"""A link that breaks under a command: what became of it is asked again over the next one, and done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from updating import Held, begin, commit, digest, join, restart, unreachable, version_of, weights, write
from waiting import eventually

from rlctl.ports import new_uuid7
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_UNKNOWN, RequestHeader, Target
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_UNKNOWN


async def reset(fleet: InProcessFleet, slot: str) -> None:
    await fleet.server.coordinator.roster.slots[slot].commander.close()


@pytest.mark.parametrize("step", ["pause_generation", "prepare_update", "commit_update", "flush_cache"])
async def test_a_link_that_is_reset_under_a_step_of_an_update_does_not_end_it(fleet: InProcessFleet, step: str) -> None:
    held = Held(fleet, step)
    plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT))
    await join(fleet, plan)

    async def whole() -> object:
        await write(fleet, plan, "new")
        return await commit(fleet, plan, digest("new"))

    updating = asyncio.ensure_future(whole())
    await held.begun.wait()
    await reset(fleet, "a")
    await fleet.until(lambda stages: stages[0].state != common.STAGE_STATE_UNREACHABLE)
    held.may_end.set()
    operation = await updating
    assert operation.state == OPERATION_STATE_OK, operation.error
    assert [result.outcome for result in operation.stage_results] == [OUTCOME_APPLIED] * 2
    assert held.times == 1
    assert version_of(fleet) == ("step-1", 2)
    assert set(weights(fleet)) == {"new"}


async def test_an_answer_that_was_lost_with_its_link_is_learned(fleet: InProcessFleet) -> None:
    held = Held(fleet, "pause_generation")
    pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest()))
    await held.begun.wait()
    async with unreachable(fleet, "a"):
        held.may_end.set()
        await eventually(lambda: fleet.stages["a"]._stage.facts.paused)
    operation = await pausing
    assert operation.state == OPERATION_STATE_OK, operation.error
    assert held.times == 1
    assert not fleet.stage("a").HasField("quarantine")


async def test_what_becomes_of_it_stays_unknown_when_the_stage_does_not_come_back(
    make_fleet: Callable[..., Any],
) -> None:
    async with make_fleet(a=1, b=2, lease_s=0.5) as fleet:
        held = Held(fleet, "pause_generation")
        pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest()))
        await held.begun.wait()
        async with unreachable(fleet, "a"):
            operation = await pausing
            assert operation.state == OPERATION_STATE_UNKNOWN
            assert [result.error.reason for result in operation.stage_results] == ["LINK_LOST", "CANCELLED"]
        held.may_end.set()


async def test_its_deadline_is_the_command_s_own(fleet: InProcessFleet) -> None:
    held = Held(fleet, "pause_generation")
    header = RequestHeader(target=Target(slots=["a"]))
    header.timeout.FromMilliseconds(700)
    pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header)))
    await held.begun.wait()
    async with unreachable(fleet, "a"):
        operation = await pausing
    assert [(result.outcome, result.error.reason) for result in operation.stage_results] == [
        (OUTCOME_UNKNOWN, "DEADLINE_EXCEEDED")
    ]
    held.may_end.set()


async def test_another_incarnation_is_not_asked(fleet: InProcessFleet) -> None:
    held = Held(fleet, "pause_generation")
    pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest()))
    await held.begun.wait()
    restarting = asyncio.ensure_future(restart(fleet, "a"))
    operation = await pausing
    assert operation.stage_results[0].outcome == OUTCOME_UNKNOWN
    assert operation.stage_results[0].error.reason == "LINK_LOST"
    held.may_end.set()
    await restarting
    assert held.times == 1


async def test_what_was_cancelled_meanwhile_is_not_asked_again(fleet: InProcessFleet) -> None:
    held = Held(fleet, "pause_generation")
    header = RequestHeader(target=Target(slots=["a"]), request_id=new_uuid7())
    pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header)))
    await held.begun.wait()
    async with unreachable(fleet, "a"):
        cancelled = await fleet.stub.CancelOperation(rpc.CancelOperationRequest(operation_id=header.request_id))
        assert cancelled.stage_results[0].error.reason == "LINK_LOST"
        assert (await pausing).state == OPERATION_STATE_UNKNOWN
    held.may_end.set()
