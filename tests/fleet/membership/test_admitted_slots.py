"""A fleet that `up` has started is joined by the slots of its topology, and by others only when an operator says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from updating import refusal

from rlctl.contract.errors import InvalidRequest, PreconditionFailed, Reason, RlctlError
from rlctl.coordinator.fleet.admitted_slots import AdmittedSlots
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import coordinator_pb2 as c
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.fleet_pb2 import StageRegistration
from rlctl.v1.results_pb2 import OPERATION_STATE_OK


@pytest.fixture
async def closed(fleet: InProcessFleet) -> InProcessFleet:
    """A fleet that admits stages a and b, which are there."""
    close(fleet)
    return fleet


def close(fleet: InProcessFleet) -> None:
    coordinator = fleet.server.coordinator
    coordinator.admitted_slots = AdmittedSlots(coordinator._journal, {"a", "b"})
    coordinator.admitted_slots.load()


def stranger(fleet: InProcessFleet, slot: str) -> c.RegisterStageRequest:
    """A stage of a slot that is not in the topology, at the address of one that is."""
    registration = StageRegistration()
    registration.CopyFrom(fleet.stage("a").registration)
    registration.slot, registration.boot_id = slot, "of a stranger"
    return c.RegisterStageRequest(registration=registration)


def slots(fleet: InProcessFleet) -> list[str]:
    return [stage.registration.slot for stage in fleet.server.coordinator.roster.fleet().stages]


async def test_a_stage_of_another_slot_is_refused_told_once_and_in_nobodys_way(
    closed: InProcessFleet, caplog: pytest.LogCaptureFixture, checkpoint: Callable[[str], str]
) -> None:
    for _ in range(3):
        error = await refusal(closed.stub.RegisterStage(stranger(closed, "z")))
        assert (error.reason, error.field) == (Reason.SLOT_NOT_ADMITTED, "registration.slot")
        assert "rlctl admit z" in error.next_step
    assert slots(closed) == ["a", "b"]
    assert sum("z at" in record.message for record in caplog.records) == 1
    update = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
    assert (await closed.stub.UpdateWeightsFromDisk(update)).state == OPERATION_STATE_OK


async def test_an_operator_admits_a_slot_durably_and_dismisses_it(closed: InProcessFleet) -> None:
    tried = c.AdmitSlotsRequest(header=RequestHeader(validate_only=True), slots=["z"])
    assert (await closed.stub.AdmitSlots(tried)).slots == ["a", "b"]
    assert (await closed.stub.AdmitSlots(c.AdmitSlotsRequest(slots=["z"]))).slots == ["a", "b", "z"]
    close(closed)  # another coordinator reads the journal
    closed.specs.append(StageSpec("z", closed.specs[0].model_path))
    await closed.start_stage(closed.specs[-1])
    await closed.until(lambda stages: len(stages) == 3 and all(stage.routable for stage in stages))
    assert (await closed.stub.AdmitSlots(c.AdmitSlotsRequest(dismissed=["z"]))).slots == ["a", "b"]
    assert closed.stage("z").routable, "it stays until it leaves"
    await closed.stages.pop("z").stop()
    error = await refusal(closed.stub.RegisterStage(stranger(closed, "z")))
    assert error.reason is Reason.SLOT_NOT_ADMITTED


async def test_a_slot_of_the_topology_is_filled_again(closed: InProcessFleet) -> None:
    await closed.stages.pop("a").stop()
    await closed.start_stage(closed.specs[0])
    await closed.until(lambda stages: all(stage.routable for stage in stages))


async def test_a_fleet_without_a_topology_admits_every_slot(fleet: InProcessFleet) -> None:
    assert (await fleet.stub.AdmitSlots(c.AdmitSlotsRequest())).every
    await fleet.stub.RegisterStage(stranger(fleet, "z"))
    assert "z" in slots(fleet)


@pytest.mark.parametrize("name", ["rlctl-../../x", "a/b", "..", ".hidden", "-o", "a b", "a\nb", "x" * 256, "é"])
async def test_a_slot_is_called_so_that_it_can_name_a_file(fleet: InProcessFleet, name: str) -> None:
    error = await refusal(fleet.stub.RegisterStage(stranger(fleet, name)))
    assert (type(error), error.field) == (InvalidRequest, "registration.slot")
    error = await refusal(fleet.stub.AdmitSlots(c.AdmitSlotsRequest(slots=["a", name])))
    assert error.field == "slots[1]"
    assert slots(fleet) == ["a", "b"]


async def test_what_a_stage_says_of_itself_is_printable(fleet: InProcessFleet) -> None:
    for name in ("model", "address", "engine", "boot_id"):
        request = stranger(fleet, "z")
        setattr(request.registration, name, "x\x1b[31m")
        error = await refusal(fleet.stub.RegisterStage(request))
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, f"registration.{name}")


async def test_a_slot_cannot_be_admitted_and_dismissed(fleet: InProcessFleet) -> None:
    call: grpc.aio.UnaryUnaryCall[Any, Any] = fleet.stub.AdmitSlots(c.AdmitSlotsRequest(slots=["z"], dismissed=["z"]))
    assert (await refusal(call)).reason is Reason.FIELD_CONFLICT


def test_a_fleet_of_processes_admits_what_is_wanted_of_it(tmp_path: Path, checkpoint: Callable[[str], str]) -> None:
    one = EngineSpec("actor-0", checkpoint("one"), engine="fake")
    with LaunchedFleet([one], directory=tmp_path / "fleet") as fleet, fleet.connect() as client:
        registration = StageRegistration()
        registration.CopyFrom(client.status().stages[0].registration)
        registration.slot, registration.boot_id = "actor-9", "of a stranger"
        request = c.RegisterStageRequest(registration=registration)
        with pytest.raises(PreconditionFailed, match="actor-9"):
            client.loop.call(client.aio.connection.call("RegisterStage", request, 5.0))
        two = dataclasses.replace(one, slot="actor-1")
        fleet.want([one, two])
        fleet.settle()
        assert [stage.registration.slot for stage in client.status().stages] == ["actor-0", "actor-1"]
        assert client.admit([]).slots == ["actor-0", "actor-1"]
        fleet.want([two])
        fleet.settle()
        assert client.admit([]).slots == ["actor-1"]


def test_a_restart_of_an_unknown_slot_changes_nothing(tmp_path: Path, checkpoint: Callable[[str], str]) -> None:
    one = EngineSpec("actor-0", checkpoint("one"), engine="fake")
    with LaunchedFleet([one], directory=tmp_path / "fleet") as fleet:
        with pytest.raises(RlctlError, match="there is no engine 'nobody'; there are: actor-0, actor-1"):
            fleet.want([one, dataclasses.replace(one, slot="actor-1")], restarted=["nobody"])
        assert [spec.slot for spec in fleet.engines] == ["actor-0"]
        assert fleet.settled
