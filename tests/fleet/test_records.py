"""Records that several want to change at the same time: the journal and the coordinator's memory end up the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from updating import begin, commit, digest, join, write

from rlctl.errors import Reason
from rlctl.ports import Put
from rlctl.testing.fleet import InProcessFleet, StageSpec
from rlctl.testing.waiting import eventually
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import update_pb2 as u
from rlctl.v1.journal_pb2 import ModelRecord, SlotRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation

MEANWHILE_S = 0.3
"""How long something may get ahead of a record that is being written; what waits for the record does not end in it."""


@asynccontextmanager
async def at_write(
    fleet: InProcessFleet, which: Callable[[Put], bool], *, before: Any = None, after: Any = None
) -> AsyncIterator[None]:
    """Once, when such a record is written: coroutines that run before, and before its writer learns that it is."""
    journal = fleet.server.coordinator._journal
    write_through = journal.write
    left = [True]

    async def write(changes: Sequence[Any]) -> None:
        chosen = left and any(isinstance(change, Put) and which(change) for change in changes)
        if chosen:
            left.clear()
        if chosen and before is not None:
            await before()
        await write_through(changes)
        if chosen and after is not None:
            await after()

    journal.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        journal.write = write_through  # type: ignore[method-assign]
    assert not left, "no such record was written"


def slot_record(fleet: InProcessFleet, slot: str) -> SlotRecord:
    journal = fleet.server.coordinator._journal
    return next(SlotRecord.FromString(body) for key, body in journal.read("slot") if key == slot)


def publishes(put: Put) -> bool:
    """Whether it is the record of the second version."""
    return put.kind == "model" and ModelRecord.FromString(put.body).latest.sequence == 2


async def update(fleet: InProcessFleet) -> Operation:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    return await commit(fleet, plan, digest("w1"))


async def test_a_stage_that_is_disabled_while_a_version_is_published_stays_disabled(fleet: InProcessFleet) -> None:
    updating: list[asyncio.Task[Operation]] = []

    async def publish() -> None:
        updating.append(asyncio.create_task(update(fleet)))
        await asyncio.wait(updating, timeout=MEANWHILE_S)

    def disables(put: Put) -> bool:
        return put.kind == "slot" and not SlotRecord.FromString(put.body).enabled

    async with at_write(fleet, disables, after=publish):
        await fleet.stub.SetStageEnabled(rpc.SetStageEnabledRequest(slots=["a"], enabled=False))
    assert (await updating[0]).state == OPERATION_STATE_OK
    assert not fleet.stage("a").enabled
    assert not slot_record(fleet, "a").enabled


async def test_a_quarantine_that_comes_while_a_version_is_published_stays(fleet: InProcessFleet) -> None:
    roster = fleet.server.coordinator.roster
    quarantining: list[asyncio.Task[None]] = []
    cause = Reason.ENGINE_FAILED.error("just now").detail()

    async def quarantine() -> None:
        quarantining.append(asyncio.create_task(roster.quarantine({roster.slots["a"]: cause})))
        await asyncio.wait(quarantining, timeout=MEANWHILE_S)

    await roster.quarantine({roster.slots["b"]: cause})
    async with at_write(fleet, publishes, before=quarantine):
        assert (await update(fleet)).state == OPERATION_STATE_OK
    await quarantining[0]
    assert fleet.stage("a").quarantine.message == "just now"
    assert slot_record(fleet, "a").quarantine.message == "just now"
    assert not slot_record(fleet, "b").HasField("quarantine"), "that of a stage which confirmed the update is over"
    assert not fleet.stage("b").HasField("quarantine")


async def test_a_stage_that_registers_while_a_version_is_published_does_not_set_the_model_back(
    fleet: InProcessFleet,
) -> None:
    coordinator = fleet.server.coordinator
    registering: list[asyncio.Task[Any]] = []

    async def register() -> None:
        registration = fleet.stage("a").registration
        registering.append(asyncio.create_task(coordinator.roster.register(registration)))
        await asyncio.wait(registering, timeout=MEANWHILE_S)

    async with at_write(fleet, publishes, after=register):
        assert (await update(fleet)).state == OPERATION_STATE_OK
    await registering[0]
    (body,) = [body for _, body in coordinator._journal.read("model")]
    assert ModelRecord.FromString(body).latest.sequence == 2
    assert fleet.stage("a").incarnation == 1


async def test_an_update_that_begins_while_the_first_version_is_published_gets_the_sequence_after_it(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    beginning: list[asyncio.Task[Any]] = []

    async def early() -> None:
        request = u.BeginWeightUpdateRequest(model="critic", version="step-1", trainer=u.Trainer(name="trainer"))
        beginning.append(asyncio.create_task(fleet.server.coordinator.begin_weight_update(request)))
        await asyncio.wait(beginning, timeout=MEANWHILE_S)

    def first(put: Put) -> bool:
        return (put.kind, put.key) == ("model", "critic") and ModelRecord.FromString(put.body).latest.sequence == 1

    async with at_write(fleet, first, before=early):
        await fleet.start_stage(StageSpec("critic", checkpoint("early"), model="critic"))
        await eventually(lambda: beginning)
        plan = await beginning[0]
    assert plan.version.sequence == 2
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    ended = await commit(fleet, plan, digest("w1"))
    assert ended.state == OPERATION_STATE_OK, ended.error


async def test_a_first_version_that_comes_while_an_update_is_open_does_not_get_its_sequence(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    model = fleet.server.coordinator.roster.models["actor"]
    # As a coordinator with a new journal finds stages that came to it unusable.
    model.record, model.admitted = ModelRecord(name="actor", updatable=True), []
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    fleet.specs.append(StageSpec("c", checkpoint("one")))
    await fleet.start_stage(fleet.specs[-1])
    await eventually(lambda: model.record.latest.label == "initial")
    ended = await commit(fleet, plan, digest("w1"))
    assert ended.state == OPERATION_STATE_OK, ended.error
    assert (model.record.latest.label, model.record.latest.sequence) == ("step-1", 2)
