"""Calls without keys of their own: for how long one is answered with an operation that another one began."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fleet_steps import engines, group, header
from journal_faults import full_disk
from updating import refusal, weights
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.coordinator.operations.call_coalescing import JOINED_S
from rlctl.engine import Call
from rlctl.ports import new_uuid7
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.journal_pb2 import OperationRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

Checkpoint = Callable[[str], str]


def later(fleet: InProcessFleet) -> None:
    """From now on it is so much later, for whoever may still join."""
    joining = fleet.server.coordinator.updates.joining
    now = joining._clock.now
    joining._clock = type("Later", (), {"now": lambda self: now() + JOINED_S})()  # type: ignore[assignment]


@pytest.mark.parametrize("destroyed", [False, True])
async def test_a_group_whose_callers_had_left_is_formed_anew(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch, destroyed: bool
) -> None:
    go_on, init = asyncio.Event(), FakeEngine.init_weights_update_group

    async def wait(engine: FakeEngine, request: v.InitWeightsUpdateGroupRequest, call: Call) -> object:
        await go_on.wait()
        return await init(engine, request, call)

    monkeypatch.setattr(FakeEngine, "init_weights_update_group", wait)
    calls = [asyncio.ensure_future(group(fleet, "b", 1)), asyncio.ensure_future(group(fleet, "a", 3))]
    listed = fleet.server.coordinator.operations.newest_first
    await eventually(lambda: len(listed("InitWeightsUpdateGroup", 0)) == 1)
    [run] = listed("InitWeightsUpdateGroup", 0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    go_on.set()
    await run.ended.wait()
    if destroyed:
        request = v.DestroyWeightsUpdateGroupRequest(group_name="slime-pp_0")
        assert (await fleet.stub.DestroyWeightsUpdateGroup(request)).state == OPERATION_STATE_OK
    else:
        later(fleet)
    again = await asyncio.gather(group(fleet, "b", 1), group(fleet, "a", 3))
    assert {operation.state for operation in again} == {OPERATION_STATE_OK}
    assert run.operation.operation_id not in {operation.operation_id for operation in again}
    assert all(engine._groups for engine in engines(fleet))


async def test_a_path_is_read_again_a_minute_after_nobody_heard_of_the_first_time(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    path = checkpoint("two")
    reading, go_on = asyncio.Event(), asyncio.Event()

    def call() -> Any:
        return fleet.stub.UpdateWeightsFromDisk(v.UpdateWeightsFromDiskRequest(header=header("a"), model_path=path))

    async def wait(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "update_weights_from_disk":
            reading.set()
            await go_on.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
    first = asyncio.ensure_future(call())
    await reading.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    [run] = fleet.server.coordinator.operations.newest_first("UpdateWeightsFromDisk", 0)
    go_on.set()
    await run.ended.wait()
    fake_engine.FAULTS.clear()
    (Path(path) / "weights.txt").write_text("three")
    later(fleet)
    assert (await call()).state == OPERATION_STATE_OK
    assert weights(fleet) == ["three"] * 3


async def test_a_call_that_was_answered_at_its_acceptance_is_joined_until_the_operation_has_ended(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    path = checkpoint("two")
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def call(slot: str) -> str:
        request = v.UpdateWeightsFromDiskRequest(header=header(slot), model_path=path, is_async=True)
        operation_id: str = (await fleet.stub.UpdateWeightsFromDisk(request)).operation_id
        return operation_id

    async def wait(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "update_weights_from_disk":
            reading.set()
            await go_on.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
    first = await call("a")
    await reading.wait()
    later(fleet)
    assert await call("a") == first, "a repeat"
    assert await call("b") == first, "the call for the other engine comes more than a minute after the acceptance"
    go_on.set()
    await fleet.server.coordinator.operations.get(first).ended.wait()
    fake_engine.FAULTS.clear()
    again = await call("a")
    assert again != first
    await fleet.server.coordinator.operations.get(again).ended.wait()


async def test_a_call_that_joined_is_on_record_when_it_is_answered(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    path, keys = checkpoint("two"), {slot: new_uuid7() for slot in "ab"}

    def call(slot: str) -> Any:
        asked = RequestHeader(for_slot=slot, request_id=keys[slot])
        return fleet.stub.UpdateWeightsFromDisk(
            v.UpdateWeightsFromDiskRequest(header=asked, model_path=path, weight_version="two")
        )

    first = await call("a")
    async with full_disk(fleet):
        assert (await refusal(call("b"))).reason is Reason.JOURNAL_FAILED
    assert (await call("b")).operation_id == first.operation_id
    records = [OperationRecord.FromString(body) for _, body in fleet.server.coordinator._journal.read("operation")]
    assert keys["b"] in {joined.request_id for record in records for joined in record.joined}
