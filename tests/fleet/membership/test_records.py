"""Records that several want to change at the same time: the journal and the coordinator's memory end up the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from journal_faults import MEANWHILE_S, at_write
from updating import abort, begin, commit, digest, from_disk, join, refusal, write
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.coordinator.updates import manager
from rlctl.engine import Call
from rlctl.ports import Put
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import update_pb2 as u
from rlctl.v1.common_pb2 import STAGE_STATE_STALE, RequestHeader, Target
from rlctl.v1.journal_pb2 import (
    UPDATE_PHASE_OPEN,
    UPDATE_PHASE_PUBLISHED,
    UPDATE_PHASE_WRITING,
    ModelRecord,
    OperationRecord,
    SlotRecord,
    UpdatePhase,
    UpdateRecord,
)
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_RUNNING, OPERATION_STATE_UNKNOWN, Operation


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


async def test_a_quarantine_that_the_journal_did_not_take_is_recorded_once_it_does(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the coordinator after this one would not know of it."""
    monkeypatch.setattr(manager, "LOOK_S", 0.05)
    async with make_fleet(a=1, b=1) as fleet:
        coordinator = fleet.server.coordinator
        write_through = coordinator._journal.write

        async def refuse(_: object) -> None:
            raise Reason.JOURNAL_FAILED.error("no space is left")

        coordinator._journal.write = refuse
        roster, cause = coordinator.roster, Reason.ENGINE_FAILED.error("unknown").detail()
        with pytest.raises(RlctlError, match="no space"):
            await roster.quarantine({roster.slots["a"]: cause})
        assert fleet.stage("a").HasField("quarantine")
        assert not slot_record(fleet, "a").HasField("quarantine")
        coordinator._journal.write = write_through
        await eventually(lambda: slot_record(fleet, "a").quarantine.message == "unknown")


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


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        (UPDATE_PHASE_OPEN, "the coordinator was restarted while the operation ran"),
        (UPDATE_PHASE_WRITING, "the coordinator was restarted while the operation ran"),  # an earlier release's
        (UPDATE_PHASE_PUBLISHED, "its version had been published"),
    ],
)
async def test_of_updates_that_a_killed_coordinator_had_open_only_their_operations_stay(
    tmp_path: Path, phase: UpdatePhase.ValueType, said: str
) -> None:
    operation = Operation(operation_id="u", update_id="u", verb="WeightUpdate", state=OPERATION_STATE_RUNNING)
    journal = SqliteJournal(tmp_path / "journal.db")
    await journal.write(
        [
            Put("operation", "u", OperationRecord(operation=operation).SerializeToString()),
            Put("update", "u", UpdateRecord(phase=phase).SerializeToString()),
            Put("update", "u/heal/a", UpdateRecord(phase=UPDATE_PHASE_WRITING).SerializeToString()),
        ]
    )
    journal.close()
    server = CoordinatorServer(CoordinatorConfig(tmp_path / "journal.db", "127.0.0.1:0"))
    await server.start()
    try:
        assert list(server.coordinator._journal.read("update")) == []
        ended = server.coordinator.operations.get("u").operation
        assert ended.state == OPERATION_STATE_UNKNOWN
        assert ended.error.message.endswith(said)
    finally:
        await server.stop()


async def test_a_heal_that_has_ended_leaves_only_its_operation(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str]
) -> None:
    async with make_fleet(heal=False, a=1, b=2) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        plan = await begin(fleet, "aborted")
        await join(fleet, plan)
        await write(fleet, plan, "half")
        await abort(fleet, plan)
        assert (await fleet.stub.HealStage(rpc.HealStageRequest())).state == OPERATION_STATE_OK
        assert list(fleet.server.coordinator._journal.read("update")) == []


async def test_no_heal_begins_while_the_version_gets_another_label(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str]
) -> None:
    """It would bring its stage to a version of a name that is not served by its end."""
    preparing = asyncio.Event()

    async def prepared(_: FakeEngine, name: str, __: Call) -> None:
        if name == "prepare_update":
            preparing.set()

    def renames(put: Put) -> bool:
        return put.kind == "model" and ModelRecord.FromString(put.body).latest.label == "three"

    async with make_fleet(heal=False, a=1, b=2) as fleet:
        await from_disk(fleet, checkpoint("two"), "two")
        await fleet.stages.pop("b").stop()
        await fleet.workers.pop(("b", 1)).stop()
        healing: list[asyncio.Task[Operation]] = []

        async def heal() -> None:
            await fleet.start_stage(fleet.specs[1])
            await fleet.until(lambda stages: stages[1].state == STAGE_STATE_STALE)
            fake_engine.FAULTS[fleet.specs[1].model_path, 0] = prepared
            healing.append(asyncio.ensure_future(fleet.stub.HealStage(rpc.HealStageRequest(slots=["b"]))))
            await asyncio.wait(healing, timeout=MEANWHILE_S)
            assert not preparing.is_set()

        header = RequestHeader(target=Target(model="actor"))
        async with at_write(fleet, renames, before=heal):
            named = await fleet.stub.CommitWeightUpdate(u.CommitWeightUpdateRequest(header=header, version="three"))
        assert named.state == OPERATION_STATE_OK
        assert (await healing[0]).error.reason == "UPDATE_IN_PROGRESS"
        assert (await fleet.stub.HealStage(rpc.HealStageRequest(slots=["b"]))).state == OPERATION_STATE_OK
        assert fleet.stage("b").routable
        assert fleet.stage("b").report.weight_version.label == "three"


async def test_a_stage_that_is_leaving_is_no_target_of_an_update_that_begins(fleet: InProcessFleet) -> None:
    beginning: list[asyncio.Task[u.BeginWeightUpdateResponse]] = []

    async def early() -> None:
        beginning.append(asyncio.ensure_future(begin(fleet)))
        await asyncio.wait(beginning, timeout=MEANWHILE_S)

    def leaves(put: Put) -> bool:
        return put.kind == "slot" and SlotRecord.FromString(put.body).retired

    async with at_write(fleet, leaves, before=early):
        await fleet.stub.DeregisterStage(rpc.DeregisterStageRequest(slot="a"))
    assert [target.slot for target in (await beginning[0]).targets] == ["b"]


async def test_a_target_of_an_update_that_is_being_accepted_does_not_leave(fleet: InProcessFleet) -> None:
    leaving: list[asyncio.Task[Any]] = []

    async def leave() -> None:
        leaving.append(asyncio.ensure_future(fleet.stub.DeregisterStage(rpc.DeregisterStageRequest(slot="a"))))
        await asyncio.wait(leaving, timeout=MEANWHILE_S)

    async with at_write(fleet, lambda put: put.kind == "update", before=leave):
        plan = await begin(fleet)
    assert (await refusal(leaving[0])).reason is Reason.UPDATE_IN_PROGRESS
    assert [target.slot for target in plan.targets] == ["a", "b"]


async def test_a_quarantine_is_lifted_whatever_its_cause_says(make_fleet: Callable[..., Any]) -> None:
    """A copy of a cause with several metadata is the same, and its bytes may be others."""
    async with make_fleet(a=1, heal=False) as fleet:
        roster = fleet.server.coordinator.roster
        for number in range(50):
            metadata = {f"key-{number}-{each}": "value" for each in range(12)}
            cause = Reason.DIGEST_MISMATCH.error("differs", metadata=metadata).detail()
            await roster.quarantine({roster.slots["a"]: cause})
            await roster.lift_quarantine([roster.slots["a"]])
            assert not roster.slots["a"].record.HasField("quarantine"), number


@pytest.mark.parametrize("kind", ["fleet", "slot", "model", "update", "operation", "key"])
async def test_a_record_that_is_damaged_is_named_and_kept(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal.db"
    journal = SqliteJournal(path)
    await journal.write([Put(kind, "one", b"\xff")])
    journal.close()
    with pytest.raises(RlctlError, match=f"{kind} record 'one' is damaged") as caught:
        await CoordinatorServer(CoordinatorConfig(path, "127.0.0.1:0")).start()
    assert caught.value.reason is Reason.JOURNAL_FAILED
    assert caught.value.next_step.startswith("Put a copy")
    journal = SqliteJournal(path)
    assert ("one", b"\xff") in journal.read(kind)
    journal.close()
