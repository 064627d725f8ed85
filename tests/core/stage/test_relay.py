"""Rank 0's relay: nobody carries out what not everybody holds; every rank has its own entry."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from waiting import eventually

from rlctl.command_stream.commander import Commander, Issued
from rlctl.contract import outcomes
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import VERBS, Verb
from rlctl.engine import Call, Engine
from rlctl.ports import SystemClock
from rlctl.runtime import event_loops
from rlctl.stage.relay import LocalRank, Relay, RemoteRank
from rlctl.stage.state_machine import Stage
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    EVIDENCE_RANK,
    OUTCOME_APPLIED,
    OUTCOME_NOT_SENT,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    WorkerCoordinates,
)
from rlctl.v1.control_pb2 import CommandResult
from rlctl.v1.fleet_pb2 import RankStatus, StageRegistration
from rlctl.v1.results_pb2 import RankResult
from rlctl.worker.worker import Worker

CLOCK = SystemClock()
PAUSE = VERBS["PauseGeneration"]


class Steps:
    """The engine's step stream: what is ordered is carried out by every rank that accepted it."""

    def __init__(self) -> None:
        self.ordered: list[str] = []
        self.ranks: list[Rank] = []
        self.fails: Exception | None = None
        self.stuck = False
        self.withdrawn: list[str] = []

    async def order(self, command_id: str) -> int:
        if self.fails:
            raise self.fails
        self.ordered.append(command_id)
        if self.stuck:
            await asyncio.Event().wait()
        for rank in self.ranks:
            rank.finish(OUTCOME_APPLIED)
        return len(self.ordered)

    async def withdraw(self, command_id: str) -> None:
        self.withdrawn.append(command_id)


class Rank:
    """A rank that behaves as its name says."""

    def __init__(self, number: int, behaviour: str = "good") -> None:
        self.coordinates = WorkerCoordinates(rank=number)
        self.behaviour = behaviour
        self.withdrawn = False

    def issue(self, request: object, call: Call) -> tuple[asyncio.Future[None], asyncio.Future[list[RankResult]]]:
        loop = asyncio.get_running_loop()
        self.accepted, self.results = loop.create_future(), loop.create_future()
        match self.behaviour:
            case "good":
                self.accepted.set_result(None)
            case "refuses":
                self.finish(OUTCOME_REJECTED, Reason.FIELD_INVALID.error("rank says no"))
            case "gone":
                self.results.set_exception(Reason.LINK_LOST.error(outcome=OUTCOME_NOT_SENT))
                self.accepted.set_result(None)
            case "dies":
                loop.call_later(0.02, self._die)
        return self.accepted, self.results

    def _die(self) -> None:
        self.accepted.set_result(None)
        self.results.set_exception(Reason.LINK_LOST.error(outcome=OUTCOME_UNKNOWN))

    async def withdraw(self, command_id: str) -> None:
        self.withdrawn = True
        if self.behaviour == "good":
            self.finish(OUTCOME_REJECTED, Reason.CANCELLED.error("withdrawn"))

    def finish(self, outcome: int, error: RlctlError | None = None) -> None:
        if not self.accepted.done():
            self.accepted.set_result(None)
        if self.results.done():
            return
        result = RankResult(outcome=outcome, evidence=EVIDENCE_RANK, error=error.detail() if error else None)
        result.coordinates.CopyFrom(self.coordinates)
        if self.behaviour == "impostor":
            result.coordinates.rank = 0
        self.results.set_result([] if self.behaviour == "drops" else [result])


@pytest.fixture
def run() -> Callable[..., object]:
    async def run(behaviours: Sequence[str], seconds: float = 0.3) -> tuple[Steps, list[Rank], list[RankResult]]:
        steps, ranks = Steps(), [Rank(number, behaviour) for number, behaviour in enumerate(behaviours)]
        steps.ranks = ranks
        relay = Relay(steps, ranks, [r.coordinates for r in ranks], CLOCK)
        call = Call("c", CLOCK.now() + seconds)
        return steps, ranks, await relay.run(PAUSE, v.PauseGenerationRequest(), call)

    return run


def outcome(results: list[RankResult]) -> int:
    return outcomes.of_ranks(PAUSE, results, mutates=True)


async def test_all_accept_then_rank_zero_orders_once(run: Callable) -> None:
    steps, _, results = await run(["good"] * 4)
    assert steps.ordered == ["c"]
    assert [(r.coordinates.rank, r.outcome) for r in results] == [(rank, OUTCOME_APPLIED) for rank in range(4)]


async def test_a_rank_that_refuses_keeps_every_rank_from_it(run: Callable) -> None:
    steps, ranks, results = await run(["good", "good", "refuses"])
    assert steps.ordered == []
    assert ranks[0].withdrawn
    assert ranks[1].withdrawn
    assert outcome(results) == OUTCOME_REJECTED
    detail = outcomes.explain(OUTCOME_REJECTED, results)
    assert detail is not None
    assert detail.message == "rank 2: rank says no"


async def test_a_silent_rank_is_unknown_and_nobody_carries_it_out(run: Callable) -> None:
    steps, _, results = await run(["good", "silent"])
    assert steps.ordered == []
    assert [r.outcome for r in results] == [OUTCOME_REJECTED, OUTCOME_UNKNOWN]
    assert results[1].error.reason == "RANK_SILENT"
    assert outcome(results) == OUTCOME_UNKNOWN


async def test_a_rank_that_is_gone_was_not_sent_to(run: Callable) -> None:
    steps, _, results = await run(["good", "gone"])
    assert steps.ordered == []
    assert results[1].outcome == OUTCOME_NOT_SENT
    assert results[1].error.reason == "LINK_LOST"


async def test_a_rank_that_dies_while_it_decides_is_unknown(run: Callable) -> None:
    steps, _, results = await run(["good", "dies"])
    assert steps.ordered == []
    assert results[1].outcome == OUTCOME_UNKNOWN


async def test_an_answer_under_another_ranks_number_is_not_counted(run: Callable) -> None:
    _, _, results = await run(["good", "impostor"])
    # Rank 1 accepts late here, so give it: what matters is whose entry its answer becomes.
    assert [r.coordinates.rank for r in results] == [0, 1]
    assert results[1].outcome == OUTCOME_UNKNOWN


async def test_an_empty_answer_is_not_success(run: Callable) -> None:
    steps, ranks = Steps(), [Rank(0), Rank(1)]
    steps.ranks = ranks
    relay = Relay(steps, ranks, [r.coordinates for r in ranks], CLOCK)
    task = asyncio.create_task(relay.run(PAUSE, v.PauseGenerationRequest(), Call("c", CLOCK.now() + 1)))
    await asyncio.sleep(0)
    ranks[1].behaviour = "drops"
    results = await task
    assert [r.outcome for r in results] == [OUTCOME_APPLIED, OUTCOME_UNKNOWN]


@pytest.mark.parametrize("error", [Reason.ENGINE_FAILED.error("stopped"), OSError("no memory")])
async def test_an_engine_that_cannot_order_lets_nobody_start(error: Exception) -> None:
    steps, ranks = Steps(), [Rank(0), Rank(1)]
    steps.fails = error
    relay = Relay(steps, ranks, [r.coordinates for r in ranks], CLOCK)
    results = await relay.run(PAUSE, v.PauseGenerationRequest(), Call("c", CLOCK.now() + 1))
    assert all(rank.withdrawn for rank in ranks)
    assert outcome(results) == OUTCOME_REJECTED


async def test_an_engine_that_is_stuck_costs_a_command_its_deadline() -> None:
    steps, ranks = Steps(), [Rank(0), Rank(1)]
    steps.stuck = True
    relay = Relay(steps, ranks, [r.coordinates for r in ranks], CLOCK)
    async with asyncio.timeout(5.0):
        results = await relay.run(PAUSE, v.PauseGenerationRequest(), Call("c", CLOCK.now() + 0.2))
    assert outcome(results) == OUTCOME_UNKNOWN
    # The stream may have it by now: a follower that forgot it would be lost to the others once the stream comes there.
    await relay.withdraw("c")
    assert not any(rank.withdrawn for rank in ranks)


async def test_what_is_in_the_stream_is_not_taken_from_a_follower_that_it_has_not_reached() -> None:
    steps, ranks = Steps(), [Rank(0), Rank(1)]
    relay = Relay(steps, ranks, [r.coordinates for r in ranks], CLOCK)
    running = asyncio.create_task(relay.run(PAUSE, v.PauseGenerationRequest(), Call("c", CLOCK.now() + 5)))
    await eventually(lambda: bool(steps.ordered))
    await relay.withdraw("c")
    assert not ranks[1].withdrawn
    assert steps.withdrawn == ["c"]  # rank 0 knows whether that is still possible
    for rank in ranks:
        rank.finish(OUTCOME_APPLIED)
    assert outcome(await running) == OUTCOME_APPLIED


async def test_what_is_withdrawn_before_every_rank_has_accepted_is_not_ordered() -> None:
    steps, ranks = Steps(), [Rank(0), Rank(1, "slow")]
    relay = Relay(steps, ranks, [r.coordinates for r in ranks], CLOCK)
    running = asyncio.create_task(relay.run(PAUSE, v.PauseGenerationRequest(), Call("c", CLOCK.now() + 5)))
    await asyncio.sleep(0)
    ranks[1].accepted.set_result(None)
    withdrawing = asyncio.create_task(relay.withdraw("c"))
    ranks[1].behaviour = "good"
    async with asyncio.timeout(5.0):
        assert outcome(await running) == OUTCOME_REJECTED
        await withdrawing
    assert not steps.ordered


async def test_what_is_given_up_before_it_is_ordered_is_given_up_by_every_rank_at_once() -> None:
    steps, ranks = Steps(), [Rank(0), Rank(1, "silent")]
    relay = Relay(steps, ranks, [r.coordinates for r in ranks], CLOCK)
    running = asyncio.create_task(relay.run(PAUSE, v.PauseGenerationRequest(), Call("c", CLOCK.now() + 5)))
    await asyncio.sleep(0)
    await relay.withdraw("c")
    assert [rank.withdrawn for rank in ranks] == [True, True]
    assert not steps.withdrawn
    ranks[1].finish(OUTCOME_REJECTED, Reason.CANCELLED.error("withdrawn"))
    assert outcome(await running) == OUTCOME_REJECTED
    assert not steps.ordered


async def test_what_no_step_is_for_is_not_ordered() -> None:
    steps, ranks = Steps(), [Rank(0), Rank(1)]
    relay = Relay(steps, ranks, [r.coordinates for r in ranks], CLOCK)
    running = asyncio.create_task(
        relay.run(VERBS["AbortRequests"], v.AbortRequestsRequest(abort_all=True), Call("c", CLOCK.now() + 5))
    )
    await asyncio.sleep(0)
    for rank in ranks:
        rank.finish(OUTCOME_APPLIED)
    assert outcome(await running) == OUTCOME_APPLIED
    assert not steps.ordered


class Follower:
    """In place of a commander: its link is there until it breaks."""

    def issue(self, command_id: str, operation_id: str, request: object, deadline: float) -> Issued:
        loop = asyncio.get_running_loop()
        self.issued = Issued(command_id, operation_id, Any(), deadline, loop.create_future(), loop.create_future())
        return self.issued


async def test_a_follower_whose_link_breaks_is_not_taken_for_one_that_holds_the_command() -> None:
    """In the very turn in which nobody is waited for any more: this process was stopped, say."""
    follower = Follower()
    rank = RemoteRank(WorkerCoordinates(rank=1), cast(Commander, follower))
    accepted, results = rank.issue(v.PauseGenerationRequest(), Call("c", CLOCK.now() + 5))
    follower.issued.fail()
    while not results.done():
        assert not accepted.done()
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert accepted.done()
    with pytest.raises(RlctlError) as lost:
        results.result()
    assert lost.value.outcome == OUTCOME_UNKNOWN


async def test_what_is_late_is_not_ordered() -> None:
    """Every rank holds it, and the process that orders it was stopped meanwhile."""
    clock = Stopped()
    steps, ranks = Steps(), [Rank(0), Rank(1)]
    relay = Relay(steps, ranks, [r.coordinates for r in ranks], clock)
    running = asyncio.create_task(relay.run(PAUSE, v.PauseGenerationRequest(), Call("c", clock.now() + 5)))
    await asyncio.sleep(0)
    clock.late_s = 6
    assert outcome(await running) == OUTCOME_REJECTED
    assert not steps.ordered
    assert [rank.withdrawn for rank in ranks] == [True, True]


class Busy:
    """An engine that ends nothing."""

    async def pause_generation(self, request: v.PauseGenerationRequest, call: Call) -> None:
        call.accept()
        await asyncio.Event().wait()


def test_what_rank_zero_has_not_begun_when_its_time_is_up_is_refused_and_not_unknown() -> None:
    """On the loop that stages run on, whose timers do not come in the order of their times within a millisecond."""

    async def behind_another() -> tuple[int, str]:
        worker = Worker(cast(Engine, Busy()), WorkerCoordinates(), CLOCK)
        running = asyncio.ensure_future(worker.carry_out(v.PauseGenerationRequest(), Call("first", CLOCK.now() + 5)))
        await asyncio.sleep(0)
        relay = Relay(cast(Engine, Busy()), [LocalRank(worker, CLOCK)], [WorkerCoordinates()], CLOCK)
        (result,) = await relay.run(PAUSE, v.PauseGenerationRequest(), Call("second", CLOCK.now() + 0.2))
        running.cancel()
        return result.outcome, result.error.reason

    async def many() -> set[tuple[int, str]]:
        return set(await asyncio.gather(*(behind_another() for _ in range(200))))

    assert event_loops.run(many()) == {(OUTCOME_REJECTED, "DEADLINE_EXCEEDED")}


class Handing:
    """In place of a relay: the command that ends first lets another one come, just before it hands its turn on."""

    def __init__(self) -> None:
        self.ended = {name: asyncio.Event() for name in ("first", "second")}
        self.stage = Stage(StageRegistration(slot="a"), cast(Engine, None), cast(Relay, self), [], CLOCK)
        self.late: asyncio.Task[CommandResult] | None = None

    def pause(self, command_id: str, seconds: float) -> asyncio.Task[CommandResult]:
        return asyncio.create_task(
            self.stage.carry_out(v.PauseGenerationRequest(), Call(command_id, CLOCK.now() + seconds))
        )

    async def run(self, verb: Verb, request: Message, call: Call) -> list[RankResult]:
        await self.ended[call.command_id].wait()
        self.late = self.late or self.pause("late", 0.01)
        return [RankResult(outcome=OUTCOME_APPLIED)]


async def test_a_command_that_comes_as_a_turn_is_handed_on_waits_no_longer_than_its_time() -> None:
    handing = Handing()
    handing.stage.facts.joined = True
    first, second = handing.pause("first", 5), handing.pause("second", 5)
    await eventually(lambda: "second" in handing.stage._waiting)
    handing.ended["first"].set()
    async with asyncio.timeout(1.0):
        await first
        assert handing.late is not None
        refused = (await handing.late).stage
        assert (refused.outcome, refused.error.reason) == (OUTCOME_REJECTED, "DEADLINE_EXCEEDED")
        handing.ended["second"].set()
        assert (await second).stage.outcome == OUTCOME_APPLIED


async def test_a_stage_that_has_lost_a_rank_keeps_nothing_of_what_it_was_asked_for() -> None:
    stage = Stage(StageRegistration(slot="a"), cast(Engine, None), cast(Relay, None), [RankStatus()], CLOCK)
    stage.facts.joined = True
    stage.rank_lost(0, Reason.LINK_LOST.error("the follower's process is gone"))
    obstacle, kept = stage.serving.obstacle, set()
    assert obstacle is not None
    for _ in range(2):
        result = await stage.carry_out(v.PauseGenerationRequest(), Call("c", CLOCK.now() + 5))
        assert (result.stage.outcome, result.stage.error.reason) == (OUTCOME_REJECTED, "RANK_LOST")
        kept.add(len(traceback.extract_tb(obstacle.__traceback__)))
    assert len(kept) == 1


class Stopped(SystemClock):
    """Time goes on by this much while nothing runs."""

    late_s = 0.0

    def now(self) -> float:
        return super().now() + self.late_s
