"""A follower rank: whom it obeys, what it does by itself, and that its engine's failure is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call, EngineConfig, EngineInfo
from rlctl.ports import SystemClock
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.loopback_links import MemoryLink
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, WorkerCoordinates
from rlctl.v1.control_pb2 import Attach
from rlctl.v1.fleet_pb2 import Capabilities, StageLayout
from rlctl.version import CONTRACT_VERSION
from rlctl.worker.follower import Follower


class Started:
    """An engine that can be started, and fail."""

    name = "started"

    def __init__(self, on_failure: Callable[[RlctlError], None]) -> None:
        self.fail = on_failure
        self.setups: list[dict[str, str]] = []
        self.stopped = False

    async def start(self, setup: Any) -> EngineInfo:
        self.setups.append(dict(setup))
        workers = [WorkerCoordinates(rank=rank, tp=rank, host_id="h") for rank in range(2)]
        return EngineInfo(StageLayout(workers=workers), Capabilities(), "", "")

    async def stop(self) -> None:
        self.stopped = True

    async def get_loads(self, request: v.GetLoadsRequest, call: Call) -> v.Loads:
        return v.Loads()

    async def abort_requests(self, request: v.AbortRequestsRequest, call: Call) -> None:
        pass


def follower() -> tuple[Follower, Started]:
    made: list[Started] = []

    def make(on_failure: Callable[[RlctlError], None]) -> Any:
        made.append(Started(on_failure))
        return made[0]

    return Follower(make, WorkerCoordinates(rank=1), 7, SystemClock()), made[0]


def link() -> Any:
    here: MemoryLink[Any, Any] = MemoryLink()
    here.peer = MemoryLink()
    return here


def attach(version: int = CONTRACT_VERSION) -> Attach:
    return Attach(contract_version=version, engine_setup={"store": "s"})


async def outcome(rank: Follower, request: Any, *, together: bool = False) -> tuple[int, str]:
    call = Call("c", SystemClock().now() + 5)
    call.together = together
    result = (await rank.carry_out(request, call)).rank
    return result.outcome, result.error.reason


async def test_a_rank_is_one_stages_and_of_its_contract() -> None:
    rank, engine = follower()
    first, second = link(), link()
    refused = await rank.attach(attach(CONTRACT_VERSION + 1), first)
    assert (refused.error.reason, refused.error.field) == ("FIELD_INVALID", "attach.contract_version")
    assert not engine.setups
    assert not rank.obeys(first)
    assert not rank.obeys(None)
    attached = await rank.attach(attach(), first)
    assert engine.setups == [{"store": "s"}]
    (status,) = attached.report.ranks
    assert (status.alive, status.reason, status.pid) == (True, "", 7)
    assert (status.coordinates.tp, status.coordinates.host_id) == (1, "h"), "where it stands its engine says"
    assert (await rank.attach(attach(), second)).error.reason == "INCARNATION_FENCED"
    assert len(engine.setups) == 1
    assert (rank.obeys(first), rank.obeys(second)) == (True, False)
    await rank.stop()
    assert engine.stopped


async def test_a_rank_whose_engine_refuses_the_setup_can_be_attached_again() -> None:
    config = EngineConfig("nowhere", tp_size=2, rank=1)
    rank = Follower(lambda failed: FakeEngine(config, failed), WorkerCoordinates(rank=1), 7, SystemClock())
    for _ in range(2):
        refused = await rank.attach(attach(), link())
        assert (refused.error.reason, refused.error.field) == ("FIELD_INVALID", "attach.engine_setup")
    assert await outcome(rank, v.GetLoadsRequest()) == (OUTCOME_REJECTED, "ILLEGAL_STATE")


async def test_a_rank_whose_engine_fails_after_its_start_began_stays_with_its_rank_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, engine = follower()
    first, second = link(), link()

    async def start(setup: Any) -> EngineInfo:
        raise Reason.FIELD_INVALID.error("the installed server has no such argument", field="options.x")

    monkeypatch.setattr(engine, "start", start)
    assert (await rank.attach(attach(), first)).error.field == "options.x"
    assert rank.obeys(first), "the process ends with the link"
    assert (await rank.attach(attach(), second)).error.reason == "INCARNATION_FENCED"


async def test_by_itself_a_rank_only_reads_and_only_once_it_is_a_stages() -> None:
    rank, _ = follower()
    abort = v.AbortRequestsRequest(abort_all=True)
    assert await outcome(rank, v.GetLoadsRequest()) == (OUTCOME_REJECTED, "ILLEGAL_STATE")
    await rank.attach(attach(), link())
    assert await outcome(rank, v.GetLoadsRequest()) == (OUTCOME_APPLIED, "")
    assert await outcome(rank, abort) == (OUTCOME_REJECTED, "NOT_RANK_ZERO")
    assert await outcome(rank, abort, together=True) == (OUTCOME_APPLIED, "")


async def test_an_engine_that_fails_is_told_to_rank_zero_now_or_when_it_comes() -> None:
    failure = Reason.ENGINE_FAILED.error("its thread has ended")
    rank, engine = follower()
    zero = link()
    await rank.attach(attach(), zero)
    await asyncio.to_thread(engine.fail, failure)
    await eventually(lambda: zero.sent)
    (told,) = zero.sent[0].report.ranks
    assert (told.alive, told.reason) == (False, str(failure))
    assert rank.worker.failure is failure
    zero.cut()
    engine.fail(failure)  # nobody is there to be told
    early, engine = follower()
    engine.fail(failure)
    await eventually(lambda: early.worker.failure)
    (told,) = (await early.attach(attach(), cast(Any, link()))).report.ranks
    assert not told.alive
