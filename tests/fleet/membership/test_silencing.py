"""While a version is being published, stages that did not confirm it are told to serve nothing, and say so once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from updating import begin, join, unreachable, update, write
from waiting import eventually

from rlctl.coordinator.fleet import stage_links
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.stage_links import Peers
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.coordinator_pb2 import RegisterStageRequest
from rlctl.v1.fleet_pb2 import StageRegistration
from rlctl.v1.results_pb2 import OPERATION_STATE_OK


def silencing(fleet: InProcessFleet) -> tuple[ModelState, Peers]:
    coordinator = fleet.server.coordinator
    return coordinator.roster.models["actor"], coordinator._peers


async def unlinked(fleet: InProcessFleet, slot: str) -> None:
    """Break a stage's link; it is dialled again in 0.1 s."""
    commander = fleet.server.coordinator.roster.slots[slot].commander
    assert commander is not None
    await commander.close()
    await eventually(lambda: commander.lost)


def holds_lease(fleet: InProcessFleet, slot: str) -> bool:
    """Whether a stage itself may go on serving."""
    stage = fleet.stages[slot]._stage
    assert stage is not None
    return stage.report().lease_held


async def test_a_stage_that_has_confirmed_its_silence_is_not_asked_again(fleet: InProcessFleet) -> None:
    """Its reports while an update is open bring it grants; were each to be confirmed, there would be no end to it."""
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w")
    model, peers = silencing(fleet)
    await peers.silence(model, [])
    told = next(peers._grants)
    for _ in range(100):
        await fleet.stub.GetModelInfo(v.GetModelInfoRequest())
    assert next(peers._grants) - told < 20
    peers.speak(model)


async def test_a_stage_without_a_link_is_silent_once_it_has_confirmed_over_the_next_one(
    fleet: InProcessFleet, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lease need not run out, and it is asked once: were each report answered, they would chase each other."""
    model, peers = silencing(fleet)
    await unlinked(fleet, "a")
    told = next(peers._grants)
    caplog.set_level("INFO", stage_links.__name__)
    async with asyncio.timeout(5.0):  # of the lease's 10
        await peers.silence(model, [])
    assert re.search(r"actor: the publish waits up to \d+\.\d s for serving leases: a$", caplog.text, re.MULTILINE)
    assert not holds_lease(fleet, "a")
    assert next(peers._grants) - told < 20
    peers.speak(model)


async def test_what_a_stage_confirmed_when_another_version_was_published_does_not_count(fleet: InProcessFleet) -> None:
    model, peers = silencing(fleet)
    await peers.silence(model, [])
    peers.speak(model)
    await eventually(lambda: holds_lease(fleet, "a"))
    await unlinked(fleet, "a")
    async with asyncio.timeout(5.0):
        await peers.silence(model, [])
    assert not holds_lease(fleet, "a")
    peers.speak(model)


async def test_what_is_cut_off_is_waited_for_though_another_process_fills_its_slot(make_fleet: Callable) -> None:
    """Clients may still reach it, and it has a lease."""
    async with make_fleet(lease_s=2.0, a=1, b=1) as fleet:
        former = fleet.stages["a"]
        async with unreachable(fleet, "a"):
            await fleet.start_stage(fleet.specs[0])
            await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].routable)
            assert former._stage.report().lease_held
            assert (await update(fleet, "two")).state == OPERATION_STATE_OK
            assert not former._stage.report().lease_held
        await former.stop()


async def test_what_is_cut_off_is_waited_for_though_its_slot_serves_another_model_now(make_fleet: Callable) -> None:
    async with make_fleet(lease_s=2.0, a=1, b=1) as fleet:
        former = fleet.stages["a"]
        async with unreachable(fleet, "a"):
            await fleet.start_stage(replace(fleet.specs[0], model="critic"))
            await fleet.until(lambda stages: stages[0].registration.model == "critic" and stages[0].routable)
            assert former._stage.report().lease_held
            assert (await update(fleet, "two")).state == OPERATION_STATE_OK
            assert not former._stage.report().lease_held
        await former.stop()


async def test_what_is_cut_off_is_waited_for_by_the_next_coordinator(make_fleet: Callable) -> None:
    """Nothing on record says that it had been replaced, or which lease it has."""
    async with make_fleet(lease_s=4.0, a=1, b=1) as fleet:
        former = fleet.stages["a"]
        async with unreachable(fleet, "a"):
            await fleet.start_stage(fleet.specs[0])
            await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].routable)
        await fleet.channel.close()
        await fleet.server.stop()
        await fleet.start_coordinator(fleet.server.address)
        await fleet.until(lambda stages: all(stage.routable for stage in stages))
        assert former._stage.report().lease_held
        assert (await update(fleet, "two")).state == OPERATION_STATE_OK
        assert not former._stage.report().lease_held
        await former.stop()


async def test_who_only_says_that_it_is_at_an_address_ends_no_lease_there(make_fleet: Callable) -> None:
    async with make_fleet(lease_s=2.0, a=1, b=1) as fleet:
        registration = StageRegistration()
        registration.CopyFrom(fleet.stage("a").registration)
        async with unreachable(fleet, "a"):
            registration.boot_id = "another"
            await fleet.stub.RegisterStage(RegisterStageRequest(registration=registration))
            assert holds_lease(fleet, "a")
            assert (await update(fleet, "two")).state == OPERATION_STATE_OK
            assert not holds_lease(fleet, "a")


@pytest.mark.parametrize("gracefully", [True, False])
async def test_what_is_gone_is_not_waited_for(make_fleet: Callable, *, gracefully: bool) -> None:
    async with make_fleet(a=1, b=1) as fleet:
        former = fleet.stages["a"]
        if gracefully:
            await former.stop()
        else:
            await former._admin.stop()  # nobody listens there any more
            await eventually(lambda: fleet.server.coordinator.roster.slots["a"].gone)
        await fleet.start_stage(fleet.specs[0])
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].routable)
        async with asyncio.timeout(5.0):  # of the lease's 10
            assert (await update(fleet, "two")).state == OPERATION_STATE_OK
        if not gracefully:
            await former.stop()
