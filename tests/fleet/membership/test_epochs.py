"""Whoever can reach a stage's port can open its command stream: what that costs the fleet, and the way out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from updating import refusal
from waiting import eventually

from rlctl.command_stream.commander import Commander
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.coordinator.service import TOO_HIGH
from rlctl.ports import SystemClock
from rlctl.stage.state_machine import MOST_AHEAD, MOST_EPOCH
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.links import GrpcDialer
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2 as c
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.control_pb2 import Attach, Attached, ServingGrant
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.stage_pb2_grpc import StageServiceStub
from rlctl.version import CONTRACT_VERSION


@asynccontextmanager
async def attached(fleet: InProcessFleet, slot: str, epoch: int) -> AsyncIterator[Commander]:
    """Hold a stage under an epoch. Raises what it refuses."""
    commander = Commander(await GrpcDialer(StageServiceStub, None).dial(fleet.stages[slot].address), SystemClock())
    receiving = asyncio.create_task(commander.run())
    try:
        attach = Attach(fleet_epoch=epoch, slot=slot, incarnation=7, contract_version=CONTRACT_VERSION)
        await commander.attach(attach)
        yield commander
    finally:
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)


async def is_whole(fleet: InProcessFleet) -> None:
    await fleet.until(lambda stages: all(stage.routable for stage in stages), 30.0)
    assert (await fleet.stub.PauseGeneration(v.PauseGenerationRequest())).state == OPERATION_STATE_OK
    assert (await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())).state == OPERATION_STATE_OK


@pytest.mark.parametrize("ahead", [MOST_AHEAD + 1, 2**32, 2**64 - 2])
async def test_a_jump_that_the_fleets_coordinator_does_not_know_is_refused(fleet: InProcessFleet, ahead: int) -> None:
    epoch = fleet.server.coordinator.roster.epoch
    with pytest.raises(RlctlError, match=f"is not this fleet's: the fleet's coordinator is at {epoch}") as refused:
        async with attached(fleet, "a", epoch + ahead):
            pass
    assert refused.value.reason is Reason.EPOCH_FENCED
    await is_whole(fleet)


async def test_a_stage_without_a_coordinator_of_its_own_takes_no_epoch_that_none_can_follow(
    fleet: InProcessFleet,
) -> None:
    stage = fleet.stages["a"]._stage
    assert stage is not None
    stage.home_epoch = None
    with pytest.raises(RlctlError, match="is not this fleet's"):
        async with attached(fleet, "a", MOST_EPOCH + 1):
            pass
    await is_whole(fleet)


async def test_a_stage_that_obeys_another_epoch_says_so_and_is_taken_back_by_a_command(
    fleet: InProcessFleet,
) -> None:
    epoch = fleet.server.coordinator.roster.epoch
    async with attached(fleet, "a", epoch + MOST_AHEAD):
        pass
    await fleet.until(lambda _: "rlctl take-over a" in fleet.stage("a").not_routable, 30.0)
    assert fleet.stage("a").state == common.STAGE_STATE_UNREACHABLE
    assert f"the stage obeys epoch {epoch + MOST_AHEAD}" in fleet.stage("a").not_routable
    refused = await refusal(fleet.stub.HealStage(c.HealStageRequest(slots=["a"])))
    assert "rlctl take-over a" in refused.message
    tried = c.TakeOverStagesRequest(header=RequestHeader(validate_only=True), slots=["a"])
    await fleet.stub.TakeOverStages(tried)
    assert fleet.server.coordinator.roster.epoch == epoch
    answer = await fleet.stub.TakeOverStages(c.TakeOverStagesRequest(slots=["a"]), timeout=30)
    assert answer.header.fleet_epoch == epoch + MOST_AHEAD + 1
    await is_whole(fleet)
    assert fleet.stage("a").not_routable == ""


async def test_a_coordinator_that_no_stage_obeys_says_so(fleet: InProcessFleet) -> None:
    epoch = fleet.server.coordinator.roster.epoch
    async with attached(fleet, "a", epoch + 1), attached(fleet, "b", epoch + 1):
        await fleet.until(lambda stages: all("take-over" in stage.not_routable for stage in stages), 30.0)
        for call in (
            fleet.stub.PauseGeneration(v.PauseGenerationRequest()),
            fleet.stub.BeginWeightUpdate(u.BeginWeightUpdateRequest(model="actor", version="v")),
        ):
            error = await refusal(call)
            assert error.reason is Reason.EPOCH_FENCED
            assert f"a is UNREACHABLE: epoch {epoch} is over" in error.message


async def test_a_fleet_that_nobody_is_there_of_says_who_is_missing(fleet: InProcessFleet) -> None:
    for slot in ("a", "b"):
        await kill(fleet, slot)
    await fleet.until(lambda stages: all(stage.not_routable.startswith("UNREACHABLE: ") for stage in stages))
    error = await refusal(fleet.stub.PauseGeneration(v.PauseGenerationRequest()))
    assert error.reason is Reason.NO_TARGETS
    assert "a is UNREACHABLE: " in error.message
    assert "b is UNREACHABLE: " in error.message


async def test_a_grant_of_another_commander_keeps_none_of_the_coordinators_from_being_heard(
    fleet: InProcessFleet,
) -> None:
    epoch = fleet.server.coordinator.roster.epoch
    stage = fleet.stages["a"]._stage
    assert stage is not None
    async with attached(fleet, "a", epoch) as commander:
        commander.grant(ServingGrant(fleet_epoch=epoch, number=2**64 - 1))
        await fleet.until(lambda _: not stage.report().lease_held)
    await is_whole(fleet)


async def test_taking_over_what_the_fleet_holds_changes_nothing(fleet: InProcessFleet) -> None:
    epoch = fleet.server.coordinator.roster.epoch
    await fleet.stub.TakeOverStages(c.TakeOverStagesRequest(slots=["a", "b"]))
    assert fleet.server.coordinator.roster.epoch == epoch
    await is_whole(fleet)
    error = await refusal(fleet.stub.TakeOverStages(c.TakeOverStagesRequest(slots=["nobody"])))
    assert error.reason is Reason.STAGE_NOT_FOUND
    error = await refusal(fleet.stub.TakeOverStages(c.TakeOverStagesRequest()))
    assert (error.reason, error.field) == (Reason.FIELD_REQUIRED, "slots")


async def test_a_successor_that_was_started_often_is_followed(make_fleet: Callable[..., Any]) -> None:
    """Its stages hear of its epoch when they register again."""
    async with make_fleet(a=1) as fleet:
        coordinator = fleet.server.coordinator
        with contextlib.suppress(RlctlError):
            await coordinator._take_over(coordinator.roster.epoch + 5 * MOST_AHEAD)
        await eventually(lambda: fleet.stage("a").routable, 60.0)


async def kill(fleet: InProcessFleet, slot: str) -> None:
    """End a stage that takes no leave."""
    stage = fleet.stages.pop(slot)

    async def without_a_word() -> None:
        pass

    stage._deregister = without_a_word  # type: ignore[method-assign]
    await stage.stop()


async def test_a_stage_that_cannot_be_reached_says_why(fleet: InProcessFleet) -> None:
    await kill(fleet, "a")
    await fleet.until(lambda _: fleet.stage("a").not_routable.startswith("UNREACHABLE: "))


@pytest.mark.parametrize("reported", [TOO_HIGH, MOST_EPOCH, 2**64 - 1])
async def test_no_stage_raises_the_epoch_to_one_that_none_can_follow(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch, reported: int
) -> None:
    """The epoch is durable, and every stage of the fleet would refuse it."""
    coordinator = fleet.server.coordinator
    epoch = coordinator.roster.epoch
    ask = coordinator._ask_who

    async def says_so(address: str) -> Attached:
        attached = await ask(address)
        attached.report.fleet_epoch = reported
        return attached

    monkeypatch.setattr(coordinator, "_ask_who", says_so)
    async with attached(fleet, "a", epoch + 1):
        await fleet.until(lambda _: "take-over" in fleet.stage("a").not_routable, 30.0)
        error = await refusal(fleet.stub.TakeOverStages(c.TakeOverStagesRequest(slots=["a"])))
        assert (error.reason, error.field) == (Reason.EPOCH_FENCED, "slots[0]")
        assert str(reported) in error.message
        assert "restart" in error.next_step.lower()
        with pytest.raises(RlctlError, match=str(reported)):
            await coordinator.adopt(fleet.stages["a"].address)
    assert coordinator.roster.epoch == epoch
    assert fleet.stage("b").routable


async def test_a_stage_of_two_coordinators_at_one_epoch_is_taken_over(fleet: InProcessFleet, tmp_path: Path) -> None:
    """A restored copy of a journal comes to the same epoch. Each coordinator ends the link of the other."""
    ours = fleet.server.coordinator
    copy = tmp_path / "copy.db"
    copy.write_bytes(b"".join([part.data async for part in fleet.stub.BackupJournal(c.BackupJournalRequest())]))
    other = CoordinatorServer(CoordinatorConfig(copy, "127.0.0.1:0"))
    with contextlib.suppress(RlctlError):
        await ours._take_over(ours.roster.epoch)
    await other.start()
    try:
        assert other.coordinator.roster.epoch == ours.roster.epoch
        await eventually(lambda: other.coordinator.roster.slots["a"].linked, 10.0)
        epoch = ours.roster.epoch
        answer = await fleet.stub.TakeOverStages(c.TakeOverStagesRequest(slots=["a", "b"]), timeout=30)
        assert answer.header.fleet_epoch == epoch + 1
        await is_whole(fleet)
        await eventually(lambda: all(slot.foreign_epoch for slot in other.coordinator.roster.slots.values()), 10.0)
    finally:
        await other.stop()
