"""What an update has left behind at a stage and nobody owns: ended, and never against what somebody asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from updating import abort, begin, join, write
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.coordinator.healing import orphans
from rlctl.engine import Call
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_RETRACT,
    STAGE_STATE_PAUSED,
    RequestHeader,
    Target,
)
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, OPERATION_STATE_UNKNOWN


class Faults:
    """At stage a: writes fail, and so does going on, for as long as nothing else is said."""

    def __init__(self, fleet: InProcessFleet) -> None:
        self.goes_on = False
        self.pausing, self.paused = asyncio.Event(), asyncio.Event()
        self._engine = fleet.stages["a"]._engine
        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = self.at

    async def at(self, engine: FakeEngine, name: str, call: Call) -> None:
        if engine is not self._engine:
            return
        if name == "update_weights_from_distributed" or (name == "continue_generation" and not self.goes_on):
            raise Reason.ENGINE_FAILED.error("not now")
        if name == "pause_generation":
            self.pausing.set()
            await self.paused.wait()


async def left_paused(fleet: InProcessFleet) -> Faults:
    """An update has paused stage a, and could not let it go on at its end."""
    faults = Faults(fleet)
    faults.paused.set()
    plan = await begin(fleet, options=v.UpdateOptions(pause=PAUSE_MODE_RETRACT))
    await join(fleet, plan)
    await write(fleet, plan, "w")
    await abort(fleet, plan)
    await eventually(lambda: fleet.stage("a").report.paused_by_update == plan.update_id)
    faults.pausing.clear()
    return faults


async def test_what_is_being_paused_by_name_is_not_continued(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is under way, and what the stage has reported says nothing of it yet."""
    monkeypatch.setattr(orphans, "AGAIN_S", (0.05,))
    async with make_fleet(a=1, b=1, heal=False) as fleet:
        faults = await left_paused(fleet)
        faults.paused.clear()
        pause = v.PauseGenerationRequest(header=RequestHeader(target=Target(slots=["a"])))
        pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(pause))
        await faults.pausing.wait()
        faults.goes_on = True
        tries, looking = fleet.server.coordinator.updates._orphans, fleet.server.coordinator.roster.slots["a"]
        before = tries._steps
        await eventually(lambda: tries._steps > before or looking not in tries._tasks)
        faults.paused.set()
        assert (await pausing).state == OPERATION_STATE_OK
        await fleet.stub.GetModelInfo(v.GetModelInfoRequest())  # whatever was sent to it before has been carried out
        assert fleet.stages["a"]._stage.facts.state == STAGE_STATE_PAUSED


async def test_a_pause_that_is_taken_back_leaves_nothing_paused_that_an_update_had_left_so(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "AGAIN_S", (60.0,))
    async with make_fleet(a=1, b=1, heal=False) as fleet:
        faults = await left_paused(fleet)
        faults.goes_on = True
        other = fleet.stages["b"]._engine

        async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
            if engine is other and name == "pause_generation":
                raise Reason.ENGINE_FAILED.error("no pause")

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
        operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
        assert operation.state == OPERATION_STATE_FAILED
        assert fleet.stage("a").routable


async def test_of_a_pause_that_was_perhaps_taken_back_nothing_is_known(make_fleet: Callable) -> None:
    async with make_fleet(a=1, b=1, heal=False) as fleet:
        a, b = (fleet.stages[slot]._engine for slot in "ab")

        async def fail(engine: FakeEngine, name: str, call: Call) -> None:
            if engine is b and name == "pause_generation":
                raise Reason.ENGINE_FAILED.error("no pause")
            if engine is a and name == "continue_generation":
                raise Reason.ENGINE_FAILED.error("who knows", outcome=OUTCOME_UNKNOWN)

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fail
        operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
        assert operation.state == OPERATION_STATE_UNKNOWN
        assert [result.outcome for result in operation.stage_results] == [OUTCOME_UNKNOWN, OUTCOME_REJECTED]
