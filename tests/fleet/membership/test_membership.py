"""Who is in the fleet: incarnations, first versions, restarts of stages and of the coordinator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from children import Children
from fleet_steps import restart_coordinator
from scraping import scrape
from updating import abort, begin, refusal, unreachable
from waiting import eventually

from rlctl.command_stream.commander import Commander
from rlctl.contract.errors import InvalidRequest, Reason, RlctlError
from rlctl.coordinator.fleet import stage_links
from rlctl.coordinator.fleet.slot import Slot
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.launch.interface.spec import EngineSpec
from rlctl.sdk import aio
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport.status import from_grpc
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2 as c
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.control_pb2 import Attach, Attached
from rlctl.v1.fleet_pb2 import (
    FLEET_EVENT_KIND_CHANGED,
    FLEET_EVENT_KIND_SNAPSHOT,
    EngineFailure,
    StageLayout,
    StageRegistration,
)
from rlctl.v1.results_pb2 import OPERATION_STATE_OK


async def test_a_stage_that_comes_back_is_a_new_incarnation_and_stale_until_it_has_the_version(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str]
) -> None:
    async with make_fleet(heal=False, a=1, b=2) as fleet:
        request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
        assert (await fleet.stub.UpdateWeightsFromDisk(request)).state == OPERATION_STATE_OK
        await fleet.stages.pop("a").stop()
        await fleet.start_stage(fleet.specs[0])
        stages = await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].report.revision)
        assert fleet.stage("a").state == common.STAGE_STATE_STALE
        assert not fleet.stage("a").routable
        request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("three"))
        operation = await fleet.stub.UpdateWeightsFromDisk(request)
        assert operation.state == OPERATION_STATE_OK
        assert fleet.stage("a").routable
        assert stages[0].incarnation == 2


async def test_a_stage_that_was_replaced_and_comes_back_serves_nothing_until_it_is_healed(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str]
) -> None:
    async with make_fleet(heal=False, a=1, b=1) as fleet:
        request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
        assert (await fleet.stub.UpdateWeightsFromDisk(request)).state == OPERATION_STATE_OK
        coordinator = fleet.server.coordinator
        # Something was held against it, and then another process took its place.
        await coordinator.roster.quarantine({coordinator.roster.slots["a"]: Reason.WEIGHTS_DIRTY.error().detail()})
        impostor = StageRegistration()
        impostor.CopyFrom(fleet.stage("a").registration)
        impostor.boot_id = "another"
        coordinator._peers.connect(await coordinator.roster.register(impostor))
        await fleet.until(lambda stages: stages[0].incarnation == 3 and stages[0].state == common.STAGE_STATE_READY)
        assert fleet.stage("a").not_routable.startswith("quarantined: the process had been replaced by another process")
        await fleet.until(lambda stages: not stages[0].report.lease_held)
        with pytest.raises(RlctlError, match="no serving lease"):
            fleet.stages["a"]._stage.serving.refuse(coordinator._clock)
        await restart_coordinator(fleet)
        await fleet.until(lambda stages: stages[0].state == common.STAGE_STATE_READY)
        assert fleet.stage("a").not_routable.startswith("quarantined: the process had been replaced")
        healed = await fleet.stub.HealStage(c.HealStageRequest(slots=["a"]))
        assert healed.state == OPERATION_STATE_OK
        await fleet.until(lambda stages: stages[0].routable)


async def test_a_stage_that_is_away_is_logged_once(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage_links, "REDIAL_S", (0.01,))
    caplog.set_level("INFO", stage_links.__name__)
    coordinator, dialled = fleet.server.coordinator, 0
    dial = coordinator._peers._dialer.dial

    async def counted(address: str) -> Any:
        nonlocal dialled
        dialled += address == "127.0.0.1:1"
        return await dial(address)

    monkeypatch.setattr(coordinator._peers._dialer, "dial", counted)
    nobody = StageRegistration(slot="x", model="actor", boot_id="boot", address="127.0.0.1:1")
    coordinator._peers.connect(await coordinator.roster.register(nobody))
    await eventually(lambda: dialled > 3)
    assert [record.message.partition(":")[0] for record in caplog.records].count("x") == 1


async def test_a_living_stage_is_not_replaced_and_its_place_is_taken_when_it_has_gone(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    async with make_fleet(a=1, b=1) as fleet:
        living = fleet.stages.pop("a")
        second = await fleet.start_stage(fleet.specs[0])
        refused = f"a is filled by a living stage, at {living.address}"
        await eventually(lambda: refused in caplog.text)
        request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
        assert (await fleet.stub.UpdateWeightsFromDisk(request)).state == OPERATION_STATE_OK
        await asyncio.sleep(2.5)  # it has asked again
        assert caplog.text.count(refused) == 1
        assert second._stage is not None
        assert not second._stage.incarnation
        assert (fleet.stage("a").incarnation, fleet.stage("a").routable) == (1, True)
        await living.stop()
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].routable)
        assert second._stage.report().weight_version.sequence == 2


async def test_a_stage_that_was_cut_off_and_replaced_does_not_take_its_place_back(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    async with make_fleet(lease_s=2.0, a=1, b=1) as fleet:
        former = fleet.stages["a"]
        async with unreachable(fleet, "a"):
            await fleet.start_stage(fleet.specs[0])
            await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].routable)
        await eventually(lambda: "a is filled by a living stage" in caplog.text)
        await asyncio.sleep(2.5)
        assert (fleet.stage("a").incarnation, fleet.stage("a").routable) == (2, True)
        assert former._stage is not None
        assert not former._stage.report().lease_held
        await former.stop()


async def test_a_stage_that_loads_the_published_checkpoint_is_admitted(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
    await fleet.stub.UpdateWeightsFromDisk(request)
    await fleet.start_stage(StageSpec("new", checkpoint("two")))
    await fleet.until(lambda stages: len(stages) == 3 and stages[2].routable)
    assert fleet.stage("new").report.weight_version.sequence == 2


async def test_a_stage_with_another_checkpoint_is_stale(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    await fleet.start_stage(StageSpec("new", checkpoint("other")))
    await fleet.until(lambda stages: len(stages) == 3 and stages[2].state == common.STAGE_STATE_STALE)
    assert not fleet.stage("new").routable


async def test_a_frozen_model_refuses_updates(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    await fleet.start_stage(StageSpec("ref-0", checkpoint("ref"), model="ref", frozen=True))
    await fleet.until(lambda stages: len(stages) == 3 and all(stage.routable for stage in stages))
    async with await aio.connect(fleet.server.address) as client:
        with pytest.raises(InvalidRequest, match="model is required; models of the fleet: actor, ref"):
            await client.generate("x", max_new_tokens=1)
        named = await client.generate("x", model="ref", max_new_tokens=1)
        assert named.slot == "ref-0"
    target = common.RequestHeader(target=common.Target(model="ref"))
    request = v.UpdateWeightsFromDiskRequest(header=target, model_path=checkpoint("two"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fleet.stub.UpdateWeightsFromDisk(request)
    assert from_grpc(caught.value).reason is Reason.MODEL_FROZEN
    unnamed = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"))
    operation = await fleet.stub.UpdateWeightsFromDisk(unnamed)
    assert list(operation.targets) == ["a", "b"], "the one updatable model is meant"


async def test_a_restarted_coordinator_knows_the_fleet_and_its_operations(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), weight_version="two")
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    await fleet.stub.SetStageEnabled(c.SetStageEnabledRequest(slots=["b"], enabled=False))
    await restart_coordinator(fleet)
    await fleet.until(lambda stages: all(s.state == common.STAGE_STATE_READY for s in stages))
    assert fleet.server.coordinator.roster.epoch == 2
    assert fleet.stage("a").incarnation == 1, "a stage that merely reconnects is the same incarnation"
    assert fleet.stage("b").not_routable == "disabled"
    recorded = await fleet.stub.GetOperation(c.GetOperationRequest(operation_id=operation.operation_id))
    assert recorded.HasField("timeline"), "other answers leave it out"
    recorded.ClearField("timeline")
    assert recorded == operation
    assert fleet.server.coordinator.roster.models["actor"].record.latest.label == "two"
    paused = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert paused.state == OPERATION_STATE_OK


async def test_an_update_whose_coordinator_died_is_aborted_at_the_stages(fleet: InProcessFleet) -> None:
    stage = fleet.stages["a"]._stage
    assert stage is not None
    from rlctl.engine import Call

    request = v.PrepareUpdateRequest(version=common.WeightVersion(label="x", sequence=9))
    request.header.fence.fleet_epoch = 1
    request.header.fence.update_id = "orphan"
    loop = asyncio.get_running_loop()
    await stage.carry_out(request, Call("c", loop.time() + 5))
    assert stage.facts.state == common.STAGE_STATE_UPDATING
    await restart_coordinator(fleet)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))


async def test_a_coordinator_of_a_lower_epoch_is_not_let_in(fleet: InProcessFleet, tmp_path: Path) -> None:
    await restart_coordinator(fleet)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    impostor = InProcessFleet(tmp_path / "another.db", [])
    await impostor.start_coordinator()
    await impostor.stub.RegisterStage(c.RegisterStageRequest(registration=fleet.stage("a").registration))
    request = v.PauseGenerationRequest(header=common.RequestHeader(target=common.Target(slots=["a"])))
    operation = await impostor.stub.PauseGeneration(request)
    assert operation.stage_results[0].outcome == common.OUTCOME_NOT_SENT
    assert fleet.stages["a"]._stage.facts.fleet_epoch == 2
    await impostor.channel.close()
    await impostor.server.stop()
    assert fleet.stage("a").routable


async def test_why_a_slot_is_empty_is_shown_as_its_launcher_says_it_until_it_is_filled(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_links, "DRIFT_S", 0.0)
    async with make_fleet(a=1, lease_s=1.0) as fleet:
        failure = EngineFailure(reason="a ended with 1: no memory", failures=3, log=["one", "two"])
        request = c.ReportEngineFailureRequest(slot="a", failure=failure)
        given_up = EngineFailure(given_up=True)
        given_up.MergeFrom(failure)
        for bad in (c.ReportEngineFailureRequest(slot="zz", failure=failure), c.ReportEngineFailureRequest(slot="a")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fleet.stub.ReportEngineFailure(bad)
            assert from_grpc(caught.value).reason in (Reason.STAGE_NOT_FOUND, Reason.FIELD_REQUIRED)
        await fleet.stub.ReportEngineFailure(request)
        assert not fleet.stage("a").HasField("engine_failure"), "it has a link, and says itself how it is"
        assert fleet.stage("a").routable
        stage = fleet.stages["a"]

        async def nothing() -> None:
            """A process that dies takes no leave."""

        monkeypatch.setattr(stage, "_deregister", nothing)
        await stage.stop()
        await fleet.until(lambda stages: stages[0].state == common.STAGE_STATE_UNREACHABLE)
        assert fleet.stage("a").engine_failure == failure
        assert fleet.stage("a").not_routable == f"UNREACHABLE: crash loop, 3 failures in a row: {failure.reason}"
        async with asyncio.timeout(10):
            await eventually(lambda: not fleet.stage("a").report.lease_held)
        await fleet.stub.ReportEngineFailure(c.ReportEngineFailureRequest(slot="a", failure=given_up))
        assert fleet.stage("a").state == common.STAGE_STATE_FAILED
        assert fleet.stage("a").not_routable.startswith(
            "FAILED: crash loop, not started again after 3 failures: a ended"
        )
        await fleet.start_stage(fleet.specs[0])
        await fleet.until(lambda stages: stages[0].routable)
        assert not fleet.stage("a").HasField("engine_failure")


async def test_a_slot_stays_listed_while_its_launcher_reports_that_the_engine_failed(make_fleet: Callable) -> None:
    """The launcher ends what remains of a failed engine, and its stage deregisters. The slot is not given up."""
    async with make_fleet(a=1, b=1, metrics="127.0.0.1:0") as fleet:
        failure = EngineFailure(reason="a.1 was ended by SIGKILL", failures=1)
        await fleet.stub.ReportEngineFailure(c.ReportEngineFailureRequest(slot="a", failure=failure))
        await fleet.stages["a"].stop()
        assert fleet.server.coordinator.roster.slots["a"].record.retired
        await fleet.until(lambda stages: [stage.registration.slot for stage in stages] == ["a", "b"])
        assert fleet.stage("a").state == common.STAGE_STATE_UNREACHABLE
        assert fleet.stage("a").not_routable == f"UNREACHABLE: {failure.reason}"
        metrics = await scrape(fleet.server.metrics_address)
        assert metrics.value("rlctl_stage_routable", slot="a") == 0
        assert metrics.value("rlctl_stages", state="unreachable") == 1
        assert metrics.value("rlctl_stage_engine_failures", slot="a") == 1
        failure.given_up = True
        await fleet.stub.ReportEngineFailure(c.ReportEngineFailureRequest(slot="a", failure=failure))
        assert fleet.stage("a").state == common.STAGE_STATE_FAILED
        operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
        assert [target.slot for target in operation.stage_results] == ["b"]
        await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
        # Taken out of the topology: deregistered by the launcher, and gone.
        async with await aio.connect(fleet.server.address) as client:
            await client.deregister("a")
        assert [stage.registration.slot for stage in fleet.server.coordinator.roster.fleet().stages] == ["b"]
        await fleet.stub.ReportEngineFailure(c.ReportEngineFailureRequest(slot="a", failure=failure))
        await fleet.start_stage(fleet.specs[0])
        await fleet.until(lambda stages: len(stages) == 2 and all(stage.routable for stage in stages))


async def test_an_adopting_coordinator_fences_the_one_before(fleet: InProcessFleet, tmp_path: Path) -> None:
    successor = InProcessFleet(tmp_path / "another.db", [])
    await successor.start_coordinator()
    for slot in "ab":
        await successor.server.coordinator.adopt(fleet.stages[slot].address)
    await successor.until(lambda stages: len(stages) == 2 and all(stage.routable for stage in stages))
    assert successor.server.coordinator.roster.epoch == 2
    assert (await successor.stub.PauseGeneration(v.PauseGenerationRequest())).state == OPERATION_STATE_OK
    await fleet.until(lambda stages: {s.state for s in stages} == {common.STAGE_STATE_UNREACHABLE})
    request = v.ContinueGenerationRequest(header=common.RequestHeader(target=common.Target(slots=["a"])))
    operation = await fleet.stub.ContinueGeneration(request)
    assert operation.stage_results[0].outcome == common.OUTCOME_NOT_SENT
    assert successor.stage("a").state == common.STAGE_STATE_PAUSED
    await successor.channel.close()
    await successor.server.stop()


async def test_a_coordinator_that_has_lost_its_journal_lets_go_of_its_stages(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its successor something else may fill a slot: whoever it went on to hold here would never ask there."""
    monkeypatch.setattr(stage_links, "GRANT_EVERY_S", 0.05)
    async with make_fleet(a=1, b=1) as fleet:
        coordinator = fleet.server.coordinator
        monkeypatch.setattr(coordinator._journal, "owned", lambda: False)
        async with asyncio.timeout(10):
            await asyncio.gather(*(fleet.stages[slot]._stage.unattached.wait() for slot in "ab"))
        with pytest.raises(RlctlError, match="journal"):
            await coordinator.end_of_reign()


async def test_stages_that_are_adopted_at_once_never_lower_the_epoch(make_fleet: Callable, tmp_path: Path) -> None:
    async with make_fleet(a=1, b=1, c=1) as fleet:
        await fleet.server.stop()
        for slot, epoch in {"a": 3, "b": 5, "c": 3}.items():  # each has another past
            fleet.stages[slot]._stage.facts.fleet_epoch = epoch
        successor = InProcessFleet(tmp_path / "another.db", [])
        await successor.start_coordinator()
        coordinator = successor.server.coordinator
        await asyncio.gather(*(coordinator.adopt(fleet.stages[slot].address) for slot in "abc"))
        assert coordinator.roster.epoch == 6
        await successor.until(lambda stages: len(stages) == 3 and all(stage.routable for stage in stages))
        await restart_coordinator(successor)
        assert successor.server.coordinator.roster.epoch == 7
        await successor.channel.close()
        await successor.server.stop()


async def test_a_link_that_is_made_while_the_epoch_is_raised_is_made_again(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = fleet.server.coordinator
    attach, raised = Commander.attach, asyncio.Event()

    async def overtaken(self: Commander, request: Attach) -> Attached:
        attached = await attach(self, request)
        if not raised.is_set():
            raised.set()
            await coordinator._take_over(coordinator.roster.epoch)
        return attached

    monkeypatch.setattr(Commander, "attach", overtaken)
    await coordinator._peers.disconnect()
    await raised.wait()
    held = [fleet.stages[slot]._stage.facts for slot in "ab"]
    await fleet.until(lambda _: all(facts.fleet_epoch == coordinator.roster.epoch for facts in held))
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    assert (await fleet.stub.PauseGeneration(v.PauseGenerationRequest())).state == OPERATION_STATE_OK


async def test_every_rank_says_which_process_it_is(fleet: InProcessFleet) -> None:
    for slot in ("a", "b"):
        ranks = fleet.stage(slot).report.ranks
        assert [rank.pid for rank in ranks] == [os.getpid()] * len(ranks)
    assert len(fleet.stage("b").report.ranks) == 2


async def test_a_stage_without_a_coordinator_can_be_adopted(
    make_fleet: Callable, checkpoint: Callable[[str], str]
) -> None:
    async with make_fleet(a=1) as fleet:
        import dataclasses

        from rlctl.stage.server import StageServer

        config = dataclasses.replace(fleet.stages["a"].config, slot="alone", coordinator="")
        alone = StageServer(config)
        await alone.start()
        await fleet.server.coordinator.adopt(alone.address)
        await fleet.until(lambda stages: len(stages) == 2 and stages[1].routable)
        await alone.stop()


async def test_a_launcher_takes_no_process_off_the_record_that_came_after_its_look(
    fleet: InProcessFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = LaunchedFleet([], directory=tmp_path / "launched")
    launched.address = fleet.server.address
    status = await fleet.stub.GetFleet(c.GetFleetRequest())
    (absent,) = [stage for stage in status.stages if stage.registration.slot == "a"]
    absent.state = common.STAGE_STATE_UNREACHABLE
    present, absent.registration.boot_id = absent.registration.boot_id, "an earlier process"
    monkeypatch.setattr(launched._calls, "status", lambda: status)
    record = fleet.server.coordinator.roster.slots["a"].record
    await asyncio.to_thread(launched._dismiss_absent)
    assert not record.retired
    absent.registration.boot_id = present
    await asyncio.to_thread(launched._dismiss_absent)
    assert record.retired
    await asyncio.to_thread(launched.stop)


async def test_each_failure_of_an_engine_is_reported_also_one_that_is_the_first_again(
    fleet: InProcessFleet, tmp_path: Path
) -> None:
    """Failures count from one again after a time without them, after a change, and in a new engine."""
    children = Children()
    launched = LaunchedFleet([EngineSpec("a", "/m")], directory=tmp_path / "launched", launcher=children)
    launched.address = fleet.server.address
    await fleet.stages.pop("a").stop()

    async def end(returncode: int) -> None:
        await asyncio.to_thread(launched.look)
        children.all[-1].returncode = returncode
        await asyncio.to_thread(launched.look)
        assert launched.runs["a"].failures == 1
        assert fleet.stage("a").engine_failure.reason == f"a ended with {returncode}"

    await end(1)
    launched.runs["a"].forgive()
    await asyncio.to_thread(lambda: launched.look(restart=True))
    await end(2)
    launched.want([EngineSpec("a", "/changed")])
    while children.all[-1].returncode is not None:
        await asyncio.to_thread(launched.look)
    await end(3)
    await asyncio.to_thread(launched.stop)


async def test_a_deregistered_stage_is_no_target_any_more(fleet: InProcessFleet) -> None:
    await fleet.stub.DeregisterStage(c.DeregisterStageRequest(slot="a"))
    shown = await fleet.stub.GetFleet(c.GetFleetRequest())
    assert [s.registration.slot for s in shown.stages] == ["b"]
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    assert list(operation.targets) == ["b"]
    wrong = c.DeregisterStageRequest(slot="b", boot_id="another process")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fleet.stub.DeregisterStage(wrong)
    assert from_grpc(caught.value).reason is Reason.INCARNATION_FENCED


async def test_a_stage_that_is_dismissed_while_its_link_is_made_is_let_go(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held, and counted out, it would be told to serve and be in no update; and it would not ask to come back."""
    attached, may_go_on = asyncio.Event(), asyncio.Event()
    attach = Commander.attach

    async def slowly(self: Commander, request: Attach) -> Attached:
        answer = await attach(self, request)
        if request.slot == "a" and not attached.is_set():
            attached.set()
            await may_go_on.wait()
        return answer

    monkeypatch.setattr(Commander, "attach", slowly)
    commander = fleet.server.coordinator.roster.slots["a"].commander
    assert commander is not None
    await commander.close()
    await attached.wait()
    await eventually(lambda: fleet.stages["a"]._stage.unattached._waiters)  # it has registered, and believes to be held
    await fleet.stub.DeregisterStage(c.DeregisterStageRequest(slot="a"))
    may_go_on.set()
    await fleet.until(lambda stages: all(stage.routable for stage in stages))


async def test_a_target_of_an_open_update_does_not_leave_unless_it_goes_anyway(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    error = await refusal(fleet.stub.DeregisterStage(c.DeregisterStageRequest(slot="a")))
    assert (error.reason, error.metadata["holder"]) == (Reason.UPDATE_IN_PROGRESS, plan.update_id)
    assert fleet.stage("a").routable
    await fleet.stub.DeregisterStage(c.DeregisterStageRequest(slot="a", force=True))
    assert [s.registration.slot for s in (await fleet.stub.GetFleet(c.GetFleetRequest())).stages] == ["b"]
    await abort(fleet, plan)
    await fleet.stub.DeregisterStage(c.DeregisterStageRequest(slot="b"))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"slot": ""}, "registration.slot"),
        ({"boot_id": ""}, "registration.boot_id"),
        ({"contract_version": 99}, "registration.contract_version"),
        ({"layout": StageLayout()}, "registration.layout.workers"),
        (
            {"layout": StageLayout(workers=[common.WorkerCoordinates(rank=1)])},
            "registration.layout.workers",
        ),
    ],
)
async def test_a_bad_registration_is_refused(fleet: InProcessFleet, changes: dict, field: str) -> None:
    registration = StageRegistration()
    registration.CopyFrom(fleet.stage("a").registration)
    registration.slot = "new"
    for name, value in changes.items():
        registration.ClearField(name)
        if isinstance(value, StageLayout):
            registration.layout.CopyFrom(value)
        else:
            setattr(registration, name, value)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await fleet.stub.RegisterStage(c.RegisterStageRequest(registration=registration))
    assert from_grpc(caught.value).field == field
    assert len(fleet.server.coordinator.roster.slots) == 2


async def test_a_watch_starts_with_a_snapshot_and_goes_on_with_changes(fleet: InProcessFleet) -> None:
    events = fleet.stub.WatchFleet(c.WatchFleetRequest())
    first = await events.read()
    assert first.kind == FLEET_EVENT_KIND_SNAPSHOT
    assert [s.registration.slot for s in first.fleet.stages] == ["a", "b"]
    target = common.RequestHeader(target=common.Target(slots=["b"]))
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=target))
    async with asyncio.timeout(5):
        while True:
            event = await events.read()
            assert event.kind == FLEET_EVENT_KIND_CHANGED
            assert [s.registration.slot for s in event.fleet.stages] == ["b"]
            if event.fleet.stages[0].state == common.STAGE_STATE_PAUSED:
                break
    events.cancel()


async def test_a_watch_tells_that_a_stage_has_left(fleet: InProcessFleet) -> None:
    async with asyncio.timeout(10):
        events = fleet.stub.WatchFleet(c.WatchFleetRequest())
        await events.read()
        await fleet.stages.pop("b").stop()
        while True:
            for stage in (await events.read()).fleet.stages:
                if stage.registration.slot == "b" and stage.state == common.STAGE_STATE_RETIRED:
                    assert not stage.routable
                    events.cancel()
                    return


async def test_a_stage_that_registers_while_the_epoch_is_raised_does_not_end_that(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    coordinator = fleet.server.coordinator
    commander = coordinator.roster.slots["a"].commander
    assert commander is not None
    close = commander.close

    async def slowly() -> None:
        await fleet.start_stage(StageSpec("c", checkpoint("one")))
        await eventually(lambda: "c" in coordinator.roster.slots)
        await close()

    commander.close = slowly  # type: ignore[method-assign]
    await coordinator._take_over(coordinator.roster.epoch)
    await fleet.until(lambda stages: len(stages) == 3 and all(stage.routable for stage in stages))


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_process_that_is_deregistered_may_serve_until_its_lease_ends_unless_it_leaves(
    fleet: InProcessFleet, leaves: bool
) -> None:
    roster = fleet.server.coordinator.roster
    slot = roster.slots["a"]
    boot_id = slot.record.registration.boot_id
    assert slot.lease_until > 0
    await fleet.stub.DeregisterStage(c.DeregisterStageRequest(slot="a", boot_id=boot_id, force=True, leaves=leaves))
    await roster.register(next_process(slot))
    assert (roster.formers.until("actor") > 0) is not leaves


async def test_a_repeat_removes_no_process_that_has_registered_since(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    roster = fleet.server.coordinator.roster
    async with await aio.connect(fleet.server.address) as client:
        call = client.connection.call

        async def twice(method: str, request: Any, timeout_s: float) -> Any:
            """The first answer is lost, and another process fills the slot."""
            answer = await call(method, request, timeout_s)
            if method == "DeregisterStage":
                await roster.register(next_process(roster.slots["a"]))
                return await call(method, request, timeout_s)
            return answer

        monkeypatch.setattr(client.connection, "call", twice)
        with pytest.raises(RlctlError, match="a is filled by another process now") as caught:
            await client.deregister("a")
    assert caught.value.reason is Reason.INCARNATION_FENCED
    assert not roster.slots["a"].record.retired


def next_process(slot: Slot) -> StageRegistration:
    registration = StageRegistration()
    registration.CopyFrom(slot.record.registration)
    registration.boot_id, registration.address = "next", "127.0.0.1:1"
    return registration
