"""Engines that their stage server can start again: tried again whatever keeps them from starting, heard whenever they
fail."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet import stage_links
from rlctl.engine import EngineInfo
from rlctl.runtime.restart_limit import RestartLimit
from rlctl.stage import server
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport import grpc
from rlctl.transport.status import from_grpc
from rlctl.v1.common_pb2 import STAGE_STATE_FAILED, STAGE_STATE_PAUSED, STAGE_STATE_READY
from rlctl.v1.coordinator_pb2 import HealStageRequest
from rlctl.v1.fleet_pb2 import StageReport
from rlctl.v1.verbs_pb2 import PauseGenerationRequest

LOST = Reason.ENGINE_FAILED.error("the server process is gone")


class Restartable(FakeEngine):
    """``starts``: what happens at its first start, its second, ...: an error, or a failure right after it."""

    started = 0
    ended = False
    starts: ClassVar[list[Exception | str]] = []
    stops: ClassVar[list[Exception]] = []

    def can_restart(self) -> bool:
        return True

    async def start(self, setup: Mapping[str, str]) -> EngineInfo:
        type(self).started += 1
        what = self.starts.pop(0) if self.starts else ""
        if isinstance(what, Exception):
            raise what
        info = await super().start(setup)
        if what == "fails":
            self.fail(LOST)
        return info

    async def stop(self) -> None:
        self.ended = True
        await super().stop()
        if self.stops:
            raise self.stops.pop(0)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[Restartable]:
    monkeypatch.setattr(server, "engine_class", lambda name: Restartable)
    monkeypatch.setattr(server, "RESTART_AFTER_S", 0.01)
    monkeypatch.setattr(Restartable, "started", 0)
    monkeypatch.setattr(Restartable, "starts", [])
    monkeypatch.setattr(Restartable, "stops", [])
    return Restartable


async def ready_again(fleet: InProcessFleet, engines: type[Restartable], started: int) -> None:
    """Wait until so many engines have been started, and the last of them serves."""

    def ready() -> bool:
        report = fleet.stage("a").report
        return report.state == STAGE_STATE_READY and all(rank.alive for rank in report.ranks)

    async with asyncio.timeout(10):
        await eventually(lambda: engines.started == started)
        await eventually(ready)
    assert not engines.starts


async def test_an_engine_is_tried_again_whatever_keeps_it_from_starting_or_ending(
    make_fleet: Callable, engines: type[Restartable]
) -> None:
    async with make_fleet(a=1) as fleet:
        engines.starts[:] = [OSError("no space left on device"), LOST]
        engines.stops[:] = [OSError("no such process")]
        fleet.stages["a"]._engine.fail(LOST)
        await ready_again(fleet, engines, 4)


async def test_an_engine_that_is_started_again_under_a_pause_by_name_is_paused(
    make_fleet: Callable, engines: type[Restartable]
) -> None:
    async with make_fleet(a=1) as fleet:
        paused = await fleet.stub.PauseGeneration(PauseGenerationRequest())
        fleet.stages["a"]._engine.fail(LOST)
        await eventually(
            lambda: fleet.stage("a").incarnation == 2 and fleet.stage("a").state == STAGE_STATE_PAUSED, 10.0
        )
        assert engines.started == 2
        assert fleet.stage("a").pause.operation_id == paused.operation_id


async def test_a_stage_whose_engine_does_not_start_again_says_so_and_holds_no_lease(
    make_fleet: Callable, engines: type[Restartable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_links, "GRANT_EVERY_S", 0.05)
    monkeypatch.setattr(server, "RESTART_AT_MOST_S", 0.01)
    monkeypatch.setattr(Restartable, "log_lines", lambda self: ["early", *["CUDA out of memory " * 50] * 20])
    gate = asyncio.Event()
    async with make_fleet(a=1, b=1) as fleet:
        engine = fleet.stages["a"]._engine

        async def start(self: Restartable, setup: Mapping[str, str]) -> EngineInfo:
            type(self).started += 1
            if self.started == 2 + 8:
                await gate.wait()
            if self.started > 2 and not gate.is_set():
                raise Reason.ENGINE_FAILED.error("SGLang ended with -9: no memory")
            return await FakeEngine.start(self, setup)

        monkeypatch.setattr(Restartable, "start", start)
        began = time.time()
        engine.fail(LOST)
        async with asyncio.timeout(10):
            await eventually(lambda: fleet.stage("a").engine_failure.failures == 8)
            await eventually(lambda: not fleet.stage("a").report.lease_held)
        stage = fleet.stage("a")
        failure = stage.engine_failure
        assert (stage.state, stage.routable) == (STAGE_STATE_FAILED, False)
        assert failure.reason == "SGLang ended with -9: no memory"
        assert stage.not_routable == f"FAILED: crash loop, 8 failures in a row: {failure.reason}"
        assert began - 1 < failure.since.seconds <= failure.retry_time.seconds
        assert len(failure.log) == 20
        assert failure.log[-1] == ("CUDA out of memory " * 50)[:500]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fleet.stub.HealStage(HealStageRequest(slots=["a"]))
        assert from_grpc(caught.value).reason is Reason.RANK_LOST
        assert not fleet.stage("b").HasField("engine_failure")
        gate.set()
        async with asyncio.timeout(10):
            await eventually(lambda: fleet.stage("a").routable)
        assert not fleet.stage("a").HasField("engine_failure")


async def test_an_engine_that_has_failed_too_often_is_not_started_again(
    make_fleet: Callable, engines: type[Restartable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "RESTART_AT_MOST_S", 0.01)
    monkeypatch.setattr(Restartable, "log_lines", lambda self: ["loading", "no memory"])
    async with make_fleet(a=1) as fleet:
        stage = fleet.stages["a"]
        stage.config = dataclasses.replace(stage.config, restarts=RestartLimit(3, 600.0))
        engines.starts[:] = ["fails", OSError("no space"), LOST, "is never started"]
        stage._engine.fail(LOST)
        async with asyncio.timeout(10):
            await eventually(lambda: fleet.stage("a").engine_failure.given_up)
            await stage._restarting
        failure = fleet.stage("a").engine_failure
        assert (failure.failures, failure.reason, list(failure.log)) == (4, LOST.message, ["loading", "no memory"])
        assert not failure.HasField("retry_time")
        assert fleet.stage("a").state == STAGE_STATE_FAILED
        assert fleet.stage("a").not_routable.startswith("FAILED: crash loop, not started again after 4 failures")
        assert (engines.started, engines.starts) == (4, ["is never started"])
        assert stage._engine.ended


async def test_an_engine_that_fails_while_it_is_taken_into_service_is_started_again(
    make_fleet: Callable, engines: type[Restartable]
) -> None:
    async with make_fleet(a=1) as fleet:
        engines.starts[:] = ["fails"]
        fleet.stages["a"]._engine.fail(LOST)
        await ready_again(fleet, engines, 3)


async def test_an_engine_that_fails_as_it_starts_first_is_started_again(
    make_fleet: Callable, engines: type[Restartable]
) -> None:
    engines.starts[:] = ["fails"]
    async with make_fleet(a=1) as fleet:
        await ready_again(fleet, engines, 2)


@pytest.mark.parametrize(("steady_s", "pauses_s"), [(60.0, 0.01 + 0.02 + 0.04 + 0.08 + 0.1 + 0.1), (-1.0, 0.0)])
async def test_an_engine_that_fails_soon_after_each_start_is_started_again_later_and_later(
    make_fleet: Callable, engines: type[Restartable], monkeypatch: pytest.MonkeyPatch, steady_s: float, pauses_s: float
) -> None:
    monkeypatch.setattr(server, "RESTART_AT_MOST_S", 0.1)
    monkeypatch.setattr(server, "STEADY_S", steady_s)
    async with make_fleet(a=1) as fleet:
        since = time.monotonic()
        engines.starts[:] = ["fails"] * 6
        fleet.stages["a"]._engine.fail(LOST)
        await ready_again(fleet, engines, 8)
        assert time.monotonic() - since > pauses_s
        assert fleet.stages["a"]._pause_s == (0.1 if pauses_s else 0.01)


@pytest.mark.parametrize("when", ["as it starts", "once it has started"])
async def test_a_follower_whose_engine_fails_before_rank_zero_has_started_is_lost_to_its_stage(
    make_fleet: Callable, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    told = asyncio.Event()

    class Zero(FakeEngine):
        async def start(self, setup: Mapping[str, str]) -> EngineInfo:
            await told.wait()
            return await super().start(setup)

    class Follower(FakeEngine):
        async def start(self, setup: Mapping[str, str]) -> EngineInfo:
            self.fail(LOST)
            if when == "as it starts":
                await asyncio.sleep(0)
            return await super().start(setup)

    class Heard(server.StageServer):
        def _follower_reported(self, rank: int, report: StageReport) -> None:
            super()._follower_reported(rank, report)
            told.set()

    async with make_fleet(a=1) as fleet:
        monkeypatch.setattr(server, "engine_class", lambda _: Zero)
        monkeypatch.setattr("rlctl.worker.server.follower_class", lambda _: Follower)
        monkeypatch.setattr("rlctl.testing.in_process_fleet.StageServer", Heard)
        async with asyncio.timeout(10):
            await fleet.start_stage(StageSpec("b", checkpoint("one"), tp_size=2))
        _, stage = await fleet.until(lambda stages: len(stages) == 2 and stages[1].report.ranks)
        assert [(rank.alive, rank.reason) for rank in stage.report.ranks] == [(True, ""), (False, str(LOST))]
        assert (stage.report.quarantine.reason, stage.routable) == ("RANK_LOST", False)
