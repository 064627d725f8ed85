"""One rank's worker: what is withdrawn is never left waiting for an order that nobody will give."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rlctl.engine import Call
from rlctl.errors import Reason
from rlctl.ports import SystemClock
from rlctl.testing.waiting import eventually
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_UNKNOWN, WorkerCoordinates
from rlctl.v1.results_pb2 import RankResult
from rlctl.worker.core import Worker

SOON_S = 5.0


class Ordered:
    """An engine whose commands wait until they are ordered or withdrawn."""

    name = "ordered"

    def __init__(self) -> None:
        self.held: dict[str, asyncio.Future[None]] = {}

    async def pause_generation(self, request: v.PauseGenerationRequest, call: Call) -> None:
        self.held[call.command_id] = asyncio.get_running_loop().create_future()
        call.accept()
        await self.held[call.command_id]

    async def withdraw(self, command_id: str) -> None:
        self.held[command_id].set_exception(Reason.CANCELLED.error("withdrawn"))


@pytest.fixture
def engine() -> Ordered:
    return Ordered()


@pytest.fixture
def worker(engine: Ordered) -> Worker:
    return Worker(cast(Any, engine), WorkerCoordinates(rank=1), SystemClock())


def pause(worker: Worker, command_id: str) -> asyncio.Task[list[RankResult]]:
    call = Call(command_id, asyncio.get_running_loop().time() + 30)
    return asyncio.create_task(worker.carry_out(v.PauseGenerationRequest(), call))


async def test_what_is_withdrawn_while_it_waits_its_turn_does_not_start(worker: Worker, engine: Ordered) -> None:
    first, second = pause(worker, "first"), pause(worker, "second")
    async with asyncio.timeout(SOON_S):
        await eventually(lambda: "first" in engine.held)
        await worker.withdraw("second")
        engine.held["first"].set_result(None)
        assert (await first)[0].outcome == OUTCOME_APPLIED
        (result,) = await second
    assert (result.outcome, result.error.reason) == (OUTCOME_REJECTED, "CANCELLED")
    assert "second" not in engine.held


async def test_what_is_withdrawn_before_it_comes_does_not_start(worker: Worker, engine: Ordered) -> None:
    # The process was stopped: the command and its withdrawal are read at once.
    await worker.withdraw("late")
    async with asyncio.timeout(SOON_S):
        (result,) = await pause(worker, "late")
    assert (result.outcome, result.error.reason) == (OUTCOME_REJECTED, "CANCELLED")
    assert not engine.held


async def test_what_is_withdrawn_once_the_engine_holds_it_ends_there(worker: Worker, engine: Ordered) -> None:
    running = pause(worker, "held")
    async with asyncio.timeout(SOON_S):
        await eventually(lambda: "held" in engine.held)
        await worker.withdraw("held")
        assert (await running)[0].error.reason == "CANCELLED"
        # The turn is free again.
        following = pause(worker, "next")
        await eventually(lambda: "next" in engine.held)
        engine.held["next"].set_result(None)
        assert (await following)[0].outcome == OUTCOME_APPLIED


class Faulty(Ordered):
    """An engine that does not keep to what it has promised."""

    async def update_weights_from_disk(self, request: v.UpdateWeightsFromDiskRequest, call: Call) -> object:
        if request.model_path == "another type":
            return v.Loads()
        if request.model_path == "not of results":
            return ["applied"]
        asyncio.current_task().cancel()
        await asyncio.sleep(1)
        return None


@pytest.mark.parametrize("how", ["another type", "not of results", "cancelled"])
async def test_an_engine_that_breaks_its_promise_has_an_unknown_outcome(how: str) -> None:
    worker = Worker(cast(Any, Faulty()), WorkerCoordinates(rank=1), SystemClock())
    for command_id in ("first", "the turn is free again"):
        call = Call(command_id, asyncio.get_running_loop().time() + 5)
        (result,) = await worker.carry_out(v.UpdateWeightsFromDiskRequest(model_path=how), call)
        assert (result.coordinates.rank, result.outcome) == (1, OUTCOME_UNKNOWN)
        assert result.error.reason == "ENGINE_FAILED"
