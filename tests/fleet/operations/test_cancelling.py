"""CancelOperation, whenever it comes: what has not begun does not begin any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fleet_steps import dirty, end, held, load
from journal_faults import at_write
from updating import begin, from_disk, join, weights, write
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.ports import new_uuid7
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, RequestHeader
from rlctl.v1.results_pb2 import OPERATION_STATE_CANCELLED, OPERATION_STATE_RUNNING, Operation

Checkpoint = Callable[[str], str]


async def cancelling(fleet: InProcessFleet, operation_id: str) -> asyncio.Task[Operation]:
    """A cancellation that has reached the operation; its answer comes when that has ended."""
    run = fleet.server.coordinator.operations.get(operation_id)
    call = fleet.stub.CancelOperation(rpc.CancelOperationRequest(operation_id=operation_id))
    task = asyncio.ensure_future(call)
    await eventually(lambda: run.given_up)
    return task


async def test_a_write_that_waits_for_its_turn(fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    receiving, go_on = asyncio.Event(), asyncio.Event()
    receive, taken = FakeEngine.update_weights_from_distributed, list[str]()

    async def wait(engine: FakeEngine, request: v.UpdateWeightsFromDistributedRequest, call: Call) -> object:
        taken.extend(request.buckets[0].names)
        receiving.set()
        await go_on.wait()
        return await receive(engine, request, call)

    monkeypatch.setattr(FakeEngine, "update_weights_from_distributed", wait)
    plan = await begin(fleet)
    await join(fleet, plan)
    first = asyncio.ensure_future(write(fleet, plan, "w1"))
    await receiving.wait()
    second = asyncio.ensure_future(write(fleet, plan, "w2"))
    listed = fleet.server.coordinator.operations.newest_first
    await eventually(lambda: len(listed("UpdateWeightsFromDistributed", 0)) == 2)
    waiting = listed("UpdateWeightsFromDistributed", 0)[0].operation.operation_id
    answer = await cancelling(fleet, waiting)
    go_on.set()
    await first
    assert (await answer).state == (await second).state == OPERATION_STATE_CANCELLED
    assert "w2" not in taken
    # Whoever sends it waits in the groups for the ranks: they have left.
    assert all(not stage._engine._groups for stage in fleet.stages.values())  # type: ignore[attr-defined]
    third = await write(fleet, plan, "w3")
    assert third.error.reason == Reason.GROUP_FAILED.name


@pytest.mark.parametrize("verb", ["begin", "pause", "unload", "unload for a slot", "relabel", "heal"])
async def test_while_it_is_being_recorded(make_fleet: Callable[..., Any], checkpoint: Checkpoint, verb: str) -> None:
    key = new_uuid7()
    header = RequestHeader(request_id=key)
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        calls: dict[str, Callable[[], Any]] = {
            "begin": lambda: begin(fleet, header=header),
            "pause": lambda: fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header)),
            "unload": lambda: fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math", header=header)),
            "unload for a slot": lambda: fleet.stub.UnloadAdapter(
                v.UnloadAdapterRequest(name="math", header=RequestHeader(for_slot="a", unkeyed=True))
            ),
            "relabel": lambda: end(fleet, version="other"),
            "heal": lambda: fleet.stub.HealStage(rpc.HealStageRequest(header=header)),
        }
        if verb == "heal":
            await from_disk(fleet, checkpoint("two"), "two")
            await dirty(fleet)
        if "unload" in verb:
            await load(fleet, checkpoint("lora"))
        before = weights(fleet), held(fleet), fleet.server.coordinator.roster.models["actor"].record.latest.label
        answers: list[asyncio.Task[Operation]] = []

        async def cancel() -> None:
            [run] = fleet.server.coordinator.operations.newest_first("", OPERATION_STATE_RUNNING)
            answers.append(await cancelling(fleet, run.operation.operation_id))

        async with at_write(fleet, lambda change: change.kind == "operation", before=cancel):
            await calls[verb]()
        operation = await answers[0]
        assert operation.state == OPERATION_STATE_CANCELLED, operation
        label = fleet.server.coordinator.roster.models["actor"].record.latest.label
        assert (weights(fleet), held(fleet), label) == before
        assert not any(fleet.stage(slot).report.paused for slot in "ab") or verb == "heal"
        assert not fleet.server.coordinator.updates.is_open(operation.operation_id)


async def test_a_heal_comes_to_no_further_stage(make_fleet: Callable[..., Any], checkpoint: Checkpoint) -> None:
    reading, go_on, key = asyncio.Event(), asyncio.Event(), new_uuid7()

    async def wait(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "update_weights_from_disk":
            reading.set()
            await go_on.wait()

    async with make_fleet(a=1, b=1, c=1, heal=False) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        await fleet.stub.CheckWeights(v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))
        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
        heal = rpc.HealStageRequest(header=RequestHeader(request_id=key))
        healing = asyncio.ensure_future(fleet.stub.HealStage(heal))
        await reading.wait()
        answer = await cancelling(fleet, key)
        go_on.set()
        operation = await healing
        assert operation == await answer
        # The one that it was at may have read a part of it.
        rest = {(result.outcome, result.error.message) for result in operation.stage_results[1:]}
        assert rest == {(OUTCOME_REJECTED, "the heal was cancelled")}
