"""Lists of stages that are kept elsewhere, a router's say: a stage is out of them before it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from updating import begin, commit, digest, join, refusal, write
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet import routing_followers
from rlctl.engine import Call
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.fleet_pb2 import FLEET_EVENT_KIND_SNAPSHOT, FleetEvent
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation

CHANGING = ("pause_generation", "prepare_update", "release_memory", "check_weights")


class Listed:
    """A list of the stages that may be routed to, kept as a router's would be."""

    def __init__(self, fleet: InProcessFleet, name: str) -> None:
        self._fleet = fleet
        self._name = name
        self.slots: set[str] = set()
        self.events = 0
        self.confirms = asyncio.Event()
        self.confirms.set()

    async def keep(self) -> None:
        events = self._fleet.stub.WatchFleet(rpc.WatchFleetRequest(watch_id=self._name))
        try:
            async for event in events:
                await self._take(event)
        finally:
            events.cancel()

    async def _take(self, event: FleetEvent) -> None:
        if event.kind == FLEET_EVENT_KIND_SNAPSHOT:
            self.slots.clear()
        self.slots |= {stage.registration.slot for stage in event.fleet.stages if stage.routable}
        self.slots -= {stage.registration.slot for stage in event.fleet.stages if not stage.routable}
        self.events += 1
        if not self.slots:
            await self.confirms.wait()
        await self._fleet.stub.ConfirmFleet(rpc.ConfirmFleetRequest(watch_id=self._name, revision=event.fleet.revision))


@asynccontextmanager
async def listed(fleet: InProcessFleet, name: str = "router") -> AsyncIterator[Listed]:
    """One that is waited for."""
    kept = Listed(fleet, name)
    keeping = asyncio.create_task(kept.keep())
    waited_for = fleet.server.coordinator.roster.followers
    await eventually(lambda: name in {follower.watch_id for follower in waited_for.awaited({"actor"})})
    try:
        yield kept
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@pytest.fixture
def seen(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> list[tuple[str, str]]:
    """What engines are asked that ends their service, as (slot, method), in order."""
    told: list[tuple[str, str]] = []

    async def note(engine: FakeEngine, method: str, _: Call) -> None:
        if method in CHANGING:
            (slot,) = (name for name, stage in fleet.stages.items() if stage._engine is engine)
            told.append((slot, method))

    fake_engine.FAULTS[checkpoint("one"), 0] = note
    return told


async def _pause(fleet: InProcessFleet) -> Operation:
    return await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_ABORT))


async def _release(fleet: InProcessFleet) -> Operation:
    return await fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest())


async def _scramble(fleet: InProcessFleet) -> Operation:
    return await fleet.stub.CheckWeights(v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS))


async def _update(fleet: InProcessFleet, **fields: object) -> Operation:
    plan = await begin(fleet, **fields)
    await join(fleet, plan)
    await write(fleet, plan, "w")
    return await commit(fleet, plan, digest("w"))


async def _update_paused(fleet: InProcessFleet) -> Operation:
    return await _update(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT))


async def _update_staged(fleet: InProcessFleet) -> Operation:
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)
    return await _update(fleet, options=options, apply=v.APPLY_MODE_STAGED)


@pytest.mark.parametrize("change", [_pause, _release, _scramble, _update, _update_paused, _update_staged])
async def test_a_stage_is_off_the_list_before_it_changes(
    fleet: InProcessFleet, seen: list[tuple[str, str]], change: Callable[[InProcessFleet], Awaitable[Operation]]
) -> None:
    async with listed(fleet) as kept:
        kept.confirms.clear()
        changing = asyncio.create_task(change(fleet))
        await eventually(lambda: not kept.slots)
        beside = ("prepare_update", "check_weights") if change is _update_staged else ()  # of a shadow copy
        assert {method for _, method in seen} == {*beside}, "it was touched before the list was confirmed"
        assert all(fleet.stage(slot).report.state == common.STAGE_STATE_READY for slot in ("a", "b"))
        kept.confirms.set()
        assert (await changing).state == OPERATION_STATE_OK
        assert {slot for slot, _ in seen} == {"a", "b"}
        if change in (_update, _update_paused, _update_staged):
            await eventually(lambda: kept.slots == {"a", "b"})
        else:
            assert not kept.slots


async def test_a_stage_that_a_version_leaves_behind_is_off_the_list_before_it_is_published(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    async with listed(fleet) as kept:
        plan = await begin(fleet)
        await join(fleet, plan)
        await write(fleet, plan, "w")
        await fleet.start_stage(StageSpec("late", checkpoint("one")))
        await eventually(lambda: kept.slots == {"late"})
        kept.confirms.clear()
        committing = asyncio.create_task(commit(fleet, plan, digest("w")))
        await eventually(lambda: not kept.slots)
        (model,) = fleet.server.coordinator.roster.fleet().models
        assert model.latest.sequence == 1, "it was published before the list was confirmed"
        assert fleet.stage("late").report.lease_held
        kept.confirms.set()
        assert (await committing).state == OPERATION_STATE_OK


async def test_only_what_changes_leaves_the_list(fleet: InProcessFleet) -> None:
    async with listed(fleet) as kept:
        header = common.RequestHeader(target=common.Target(slots=["a"]))
        await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header, mode=common.PAUSE_MODE_ABORT))
        assert kept.slots == {"b"}
        await fleet.stub.SetStageEnabled(rpc.SetStageEnabledRequest(slots=["b"], enabled=False))
        assert kept.slots == set()


async def test_what_was_refused_is_on_the_list_again(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    async def refuse(_: FakeEngine, method: str, __: Call) -> None:
        if method == "pause_generation":
            raise Reason.ENGINE_FAILED.error("no", outcome=common.OUTCOME_REJECTED)

    fake_engine.FAULTS[checkpoint("one"), 0] = refuse
    async with listed(fleet) as kept:
        before = kept.events
        assert (await _pause(fleet)).state != OPERATION_STATE_OK
        await eventually(lambda: kept.slots == {"a", "b"})
        assert kept.events >= before + 2


async def test_who_does_not_confirm_is_waited_for_once(fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_followers, "CONFIRM_S", 0.2)
    loop = asyncio.get_running_loop()
    watched = fleet.server.coordinator.roster.followers
    async with listed(fleet) as kept:
        kept.confirms.clear()
        began = loop.time()
        assert (await _pause(fleet)).state == OPERATION_STATE_OK
        assert loop.time() - began >= 0.2
        assert watched.awaited({"actor"}) == [], "it is late, and nobody's wait"
        kept.confirms.set()
        await eventually(lambda: len(watched.awaited({"actor"})) == 1)


async def test_who_leaves_is_not_waited_for(fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_followers, "CONFIRM_S", 60.0)
    async with listed(fleet) as kept:
        kept.confirms.clear()
        pausing = asyncio.create_task(_pause(fleet))
        await eventually(lambda: not kept.slots)
    assert (await pausing).state == OPERATION_STATE_OK


async def test_without_a_list_nothing_is_waited_for(fleet: InProcessFleet) -> None:
    """Nor does anybody hear of a stage that is about to change."""
    roster = fleet.server.coordinator.roster
    slots = list(roster.slots.values())
    revision = roster.fleet().revision
    leaving = roster.leaving(slots)
    with pytest.raises(StopIteration):
        leaving.__aenter__().send(None)  # it does not wait, not even for a turn of the loop
    assert roster.fleet().revision == revision
    assert not any(slot.leaving for slot in slots)
    with pytest.raises(StopIteration):
        leaving.__aexit__(None, None, None).send(None)


async def test_a_list_of_another_model_is_nobodys_wait(fleet: InProcessFleet) -> None:
    watched = fleet.server.coordinator.roster.followers
    with watched.following("elsewhere", "critic") as follower:
        follower.late = False
        assert watched.awaited({"actor"}) == []
        assert watched.awaited({"actor", "critic"}) == [follower]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (rpc.ConfirmFleetRequest(revision=1), "watch_id"),
        (rpc.ConfirmFleetRequest(watch_id="nobody", revision=1), "watch_id"),
        (rpc.ConfirmFleetRequest(watch_id="x" * 129, revision=1), "watch_id"),
        (rpc.ConfirmFleetRequest(watch_id="router", revision=1 << 60), "revision"),
    ],
)
async def test_a_wrong_confirmation_is_refused(
    fleet: InProcessFleet, request_: rpc.ConfirmFleetRequest, field: str
) -> None:
    async with listed(fleet):
        error = await refusal(fleet.stub.ConfirmFleet(request_))
        assert error.field == field
