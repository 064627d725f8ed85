"""One rank's worker: what is withdrawn is never left waiting for an order that nobody will give."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any, cast

import pytest
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.ports import SystemClock
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_UNKNOWN, WorkerCoordinates
from rlctl.v1.results_pb2 import RankResult
from rlctl.worker.worker import Worker

SOON_S = 5.0


class Ordered:
    """An engine whose commands wait until they are ordered or withdrawn."""

    name = "ordered"

    def __init__(self) -> None:
        self.held: dict[str, asyncio.Future[None]] = {}
        self.accepting = asyncio.Event()
        self.accepting.set()
        self.interrupted = ""

    async def pause_generation(self, request: v.PauseGenerationRequest, call: Call) -> None:
        self.held[call.command_id] = asyncio.get_running_loop().create_future()
        await self.accepting.wait()
        call.accept()
        await self.held[call.command_id]

    async def get_loads(self, request: v.GetLoadsRequest, call: Call) -> v.Loads:
        return v.Loads(running=1)

    async def check_weights(self, request: v.CheckWeightsRequest, call: Call) -> None:
        call.accept()

    async def abort_requests(self, request: v.AbortRequestsRequest, call: Call) -> None:
        pass

    async def abort_update(self, request: v.AbortUpdateRequest, call: Call) -> None:
        call.accept()

    async def interrupt(self, update_id: str) -> None:
        self.interrupted = update_id
        for held in self.held.values():
            held.set_exception(Reason.CANCELLED.error("interrupted"))

    async def withdraw(self, command_id: str) -> None:
        self.held[command_id].set_exception(Reason.CANCELLED.error("withdrawn"))


@pytest.fixture
def engine() -> Ordered:
    return Ordered()


@pytest.fixture
def worker(engine: Ordered) -> Worker:
    return Worker(cast(Any, engine), WorkerCoordinates(rank=1), SystemClock())


def send(worker: Worker, request: Any, command_id: str, seconds: float = 30.0) -> asyncio.Task[list[RankResult]]:
    call = Call(command_id, asyncio.get_running_loop().time() + seconds)
    return asyncio.create_task(worker.carry_out(request, call))


def pause(worker: Worker, command_id: str, seconds: float = 30.0) -> asyncio.Task[list[RankResult]]:
    return send(worker, v.PauseGenerationRequest(), command_id, seconds)


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


async def test_what_is_withdrawn_before_the_engine_holds_it_ends_as_soon_as_it_does(
    worker: Worker, engine: Ordered
) -> None:
    engine.accepting.clear()
    starting = pause(worker, "starting")
    async with asyncio.timeout(SOON_S):
        await eventually(lambda: "starting" in engine.held)
        await worker.withdraw("starting")
        engine.accepting.set()
        assert (await starting)[0].error.reason == "CANCELLED"


async def test_what_comes_too_late_does_not_start_and_leaves_the_turn_as_it_was(
    worker: Worker, engine: Ordered
) -> None:
    async with asyncio.timeout(SOON_S):
        (result,) = await pause(worker, "expired", -1.0)
        assert (result.outcome, result.error.reason) == (OUTCOME_REJECTED, "DEADLINE_EXCEEDED")
        assert not engine.held
        first, second = pause(worker, "first"), pause(worker, "second")
        await eventually(lambda: "first" in engine.held)
        # A read has no turn that it could give back: the first command still has it.
        (read,) = await send(worker, v.GetLoadsRequest(), "late read", -1.0)
        assert (read.outcome, read.error.reason) == (OUTCOME_REJECTED, "DEADLINE_EXCEEDED")
        await asyncio.sleep(0.01)
        assert "second" not in engine.held
        for running, command_id in ((first, "first"), (second, "second")):
            await eventually(lambda held=command_id: held in engine.held)  # type: ignore[misc]
            engine.held[command_id].set_result(None)
            assert (await running)[0].outcome == OUTCOME_APPLIED


async def test_the_next_command_waits_for_an_engine_that_was_given_up(worker: Worker, engine: Ordered) -> None:
    async with asyncio.timeout(SOON_S):
        (result,) = await pause(worker, "first", 0.05)
        assert (result.outcome, result.error.reason) == (OUTCOME_UNKNOWN, "RANK_SILENT")
        second = pause(worker, "second")
        await asyncio.sleep(0.01)
        assert "second" not in engine.held
        engine.held["first"].set_result(None)
        await eventually(lambda: "second" in engine.held)
        engine.held["second"].set_result(None)
        assert (await second)[0].outcome == OUTCOME_APPLIED


async def test_reads_and_what_must_get_through_wait_for_nobody(worker: Worker, engine: Ordered) -> None:
    held = pause(worker, "held")
    abort = v.AbortUpdateRequest()
    abort.header.fence.update_id = "u"
    async with asyncio.timeout(SOON_S):
        await eventually(lambda: "held" in engine.held)
        following = pause(worker, "next")
        for request in (v.GetLoadsRequest(), v.CheckWeightsRequest(), v.AbortRequestsRequest(abort_all=True)):
            (result,) = await send(worker, request, type(request).__name__)
            assert result.outcome == OUTCOME_APPLIED
        # Nor have they given back a turn that was not theirs.
        assert not held.done()
        assert "next" not in engine.held
        aborting = send(worker, abort, "abort")
        assert (await held)[0].error.reason == "CANCELLED"
        await eventually(lambda: "next" in engine.held)
        engine.held["next"].set_result(None)
        assert (await following)[0].outcome == (await aborting)[0].outcome == OUTCOME_APPLIED
        assert engine.interrupted == "u"


async def test_an_engine_that_has_failed_is_asked_for_nothing_that_takes_a_turn(
    worker: Worker, engine: Ordered
) -> None:
    # What it meant for the command that met it first is not what it means for others.
    worker.failure = Reason.ENGINE_WEDGED.error("it did not come back from a broadcast", outcome=OUTCOME_UNKNOWN)
    async with asyncio.timeout(SOON_S):
        for refused in (pause(worker, "pause"), send(worker, v.CheckWeightsRequest(), "check")):
            (result,) = await refused
            assert (result.outcome, result.error.reason) == (OUTCOME_REJECTED, "ENGINE_WEDGED")
        assert not engine.held
        assert (await send(worker, v.GetLoadsRequest(), "read"))[0].outcome == OUTCOME_APPLIED


async def test_an_engine_that_has_failed_keeps_nothing_of_what_it_was_asked_for(worker: Worker) -> None:
    """A request can have megabytes."""
    worker.failure = Reason.ENGINE_FAILED.error("its thread has ended")
    await pause(worker, "first")
    kept = len(traceback.extract_tb(worker.failure.__traceback__))
    await pause(worker, "second")
    assert len(traceback.extract_tb(worker.failure.__traceback__)) == kept


class Faulty(Ordered):
    """An engine that does not keep to what it has promised."""

    async def update_weights_from_disk(self, request: v.UpdateWeightsFromDiskRequest, call: Call) -> object:
        if request.model_path == "another type":
            return v.Loads()
        if request.model_path == "not of results":
            return ["applied"]
        if request.model_path == "an error that cannot be told":
            error = Reason.CHECKPOINT_NOT_FOUND.error()
            error.message = "\ud800"
            raise error
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


async def test_an_error_that_cannot_be_told_is_an_answer_of_every_rank() -> None:
    """Without one its caller would wait until the time is up."""
    worker = Worker(cast(Any, Faulty()), WorkerCoordinates(rank=1), SystemClock(), others=[WorkerCoordinates(rank=2)])
    for command_id in ("first", "the turn is free again"):
        call = Call(command_id, asyncio.get_running_loop().time() + 5)
        request = v.UpdateWeightsFromDiskRequest(model_path="an error that cannot be told")
        results = await worker.carry_out(request, call)
        assert [(result.coordinates.rank, result.outcome) for result in results] == [
            (1, OUTCOME_UNKNOWN),
            (2, OUTCOME_UNKNOWN),
        ]
        assert {result.error.reason for result in results} == {"INTERNAL"}
