"""The command stream: at most once, late and lost answers, silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from waiting import eventually

from rlctl.command_stream import commander as commanding
from rlctl.command_stream import executor as executing
from rlctl.command_stream.commander import Commander, Issued
from rlctl.command_stream.executor import Executor
from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.ports import SystemClock
from rlctl.testing.loopback_links import MemoryLink, memory_link
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_NOT_SENT, OUTCOME_REJECTED, OUTCOME_UNKNOWN
from rlctl.v1.control_pb2 import Attach, Attached, CommandResult, ServingGrant
from rlctl.v1.fleet_pb2 import StageReport
from rlctl.v1.results_pb2 import RankResult

CLOCK = SystemClock()


class Rank:
    """Counts what it carries out; a gate holds it back."""

    def __init__(self) -> None:
        self.carried_out: list[str] = []
        self.says = ""
        self.defects: set[str] = set()
        self.withdrawn: list[str] = []
        self.strangers: list[object] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.loaded = asyncio.Event()
        self.loaded.set()

    async def attach(self, attach: Attach, link: object) -> Attached:
        await self.loaded.wait()
        if attach.fleet_epoch == 13:
            return Attached(error=Reason.EPOCH_FENCED.error("over").detail())
        if attach.fleet_epoch == 14:
            raise OSError("no room on the device")
        return Attached(report=StageReport(incarnation=attach.incarnation))

    def obeys(self, link: object) -> bool:
        return link not in self.strangers

    def grant(self, grant: ServingGrant) -> None:
        self.lease = grant.lease.seconds

    async def carry_out(self, request: Message, call: Call) -> CommandResult:
        call.accept()
        await self.gate.wait()
        self.carried_out.append(call.command_id)
        if call.command_id in self.defects:
            raise TypeError("no such thing")
        return CommandResult(rank=RankResult(outcome=OUTCOME_APPLIED, model_info=v.ModelInfo(model_path=self.says)))

    def refuse(self, error: RlctlError) -> CommandResult:
        return CommandResult(rank=RankResult(outcome=error.outcome, error=error.detail()))

    async def withdraw(self, command_id: str) -> None:
        self.withdrawn.append(command_id)


class Wire:
    """A commander and an executor with a link between them."""

    def __init__(self) -> None:
        self.rank = Rank()
        self.executor = Executor(self.rank, CLOCK)
        self.tasks: list[asyncio.Task[None]] = []
        self.reports: list[StageReport] = []

    def connect(self, clock: SystemClock = CLOCK, **settings: object) -> Commander:
        near, self.far = memory_link()
        self.near: MemoryLink = near
        commander = Commander(near, clock, on_report=self.reports.append, **settings)
        self.tasks += [asyncio.create_task(commander.run()), asyncio.create_task(self.executor.serve(self.far))]
        return commander

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    await wire.close()


def packed(request: Message | None = None) -> Any:
    body = Any()
    body.Pack(request or v.PauseGenerationRequest())
    return body


def soon(seconds: float = 5.0) -> float:
    return CLOCK.now() + seconds


async def answer(issued: Issued) -> CommandResult:
    return await asyncio.wait_for(issued.result, 5.0)


async def test_a_command_is_accepted_and_answered(wire: Wire) -> None:
    commander = wire.connect()
    issued = commander.issue("c", "o", packed(), soon())
    await issued.accepted
    result = await answer(issued)
    assert (result.command_id, result.rank.outcome) == ("c", OUTCOME_APPLIED)
    assert wire.rank.carried_out == ["c"]


async def test_an_answer_says_when_it_was_sent(wire: Wire) -> None:
    """As a pong does: who answers commands need not be asked whether it is there, nor its lease begin any earlier."""
    commander = wire.connect()
    assert commander.echo == 0
    for _ in range(2):  # the second time it is recorded
        asked = CLOCK.uptime()
        await answer(commander.issue("c", "o", packed(), soon()))
        assert asked <= commander.echo / 1e6 + 1e-6 <= CLOCK.uptime() + 1e-6


async def test_a_repeat_gets_the_recorded_result_and_attaches_while_it_runs(wire: Wire) -> None:
    commander = wire.connect()
    wire.rank.gate.clear()
    first, second = (commander.issue(name, "o", packed(), soon()) for name in ("c", "c"))
    attached = asyncio.create_task(wire.executor.execute("c", packed(), 5.0))
    await first.accepted
    wire.rank.gate.set()
    for issued in (first, second):
        assert (await answer(issued)).rank.outcome == OUTCOME_APPLIED
    assert (await attached).rank.outcome == OUTCOME_APPLIED
    third = commander.issue("c", "o", packed(), soon())
    assert (await answer(third)).rank.outcome == OUTCOME_APPLIED
    assert wire.rank.carried_out == ["c"]


async def test_the_same_id_with_another_body_is_refused(wire: Wire) -> None:
    commander = wire.connect()
    await answer(commander.issue("c", "o", packed(), soon()))
    other = commander.issue("c", "o", packed(v.PauseGenerationRequest(mode=2)), soon())
    result = await answer(other)
    assert result.rank.error.reason == "REQUEST_ID_REUSED"
    assert wire.rank.carried_out == ["c"]


async def test_what_runs_does_not_answer_for_another_body_under_its_id(wire: Wire) -> None:
    commander = wire.connect()
    wire.rank.gate.clear()
    read = commander.issue("c", "o", packed(v.GetModelInfoRequest()), soon())
    await read.accepted
    write = commander.issue("c", "o", packed(), soon())
    with pytest.raises(RlctlError) as caught:
        await answer(write)
    assert (caught.value.reason, caught.value.outcome) == (Reason.REQUEST_ID_REUSED, OUTCOME_REJECTED)
    wire.rank.gate.set()
    assert (await answer(read)).rank.outcome == OUTCOME_APPLIED
    assert wire.rank.carried_out == ["c"]


async def test_after_a_broken_link_the_result_is_there_for_the_asking(wire: Wire) -> None:
    commander = wire.connect()
    wire.rank.gate.clear()
    issued = commander.issue("c", "o", packed(), soon())
    await issued.accepted
    wire.near.cut()
    with pytest.raises(RlctlError) as caught:
        await answer(issued)
    assert (caught.value.reason, caught.value.outcome) == (Reason.LINK_LOST, OUTCOME_UNKNOWN)
    wire.rank.gate.set()
    again = wire.connect()
    result = await answer(again.issue("c", "o", packed(), soon()))
    assert result.rank.outcome == OUTCOME_APPLIED
    assert wire.rank.carried_out == ["c"]


async def test_a_command_that_nobody_wants_any_more_is_withdrawn_and_not_asked_again(wire: Wire) -> None:
    lost: list[Issued] = []
    commander = wire.connect(on_lost=lost.extend)
    wire.rank.gate.clear()
    wanted, unwanted = (commander.issue(name, "o", packed(), soon()) for name in "wc")
    commander.cancel("c")
    probe = commander.issue("probe", "o", packed(v.GetLoadsRequest()), soon())
    await probe.accepted
    assert wire.rank.withdrawn == ["c"]
    wire.near.cut()
    await wire.tasks[0]
    assert [(issued.command_id, issued.again) for issued in lost] == [("w", True), ("c", False), ("probe", True)]
    assert not wanted.result.done()
    assert not unwanted.result.done()


async def test_what_a_broken_link_took_along_is_asked_again_over_the_next(wire: Wire) -> None:
    lost: list[Issued] = []
    commander = wire.connect(on_lost=lost.extend)
    wire.rank.gate.clear()
    begun = commander.issue("begun", "o", packed(), soon())
    await begun.accepted
    wire.near.muted = True
    commander.issue("never arrived", "o", packed(), soon())
    commander.issue("late", "o", packed(), CLOCK.now() + 0.001)
    wire.near.cut()
    await wire.tasks[0]
    await asyncio.sleep(0.002)
    again = wire.connect()
    for issued in lost:
        again.ask_again(issued)
    wire.rank.gate.set()
    results = await asyncio.gather(*(answer(issued) for issued in lost), return_exceptions=True)
    assert [getattr(result, "command_id", result) for result in results[:2]] == ["begun", "never arrived"]
    assert isinstance(results[2], RlctlError)
    assert (results[2].reason, results[2].outcome) == (Reason.LINK_LOST, OUTCOME_UNKNOWN)
    assert wire.rank.carried_out == ["begun", "never arrived"]


async def test_what_never_left_is_not_sent(wire: Wire) -> None:
    commander = wire.connect()
    late = commander.issue("c", "o", packed(), CLOCK.now() - 1)
    with pytest.raises(RlctlError) as caught:
        await answer(late)
    assert (caught.value.reason, caught.value.outcome) == (Reason.DEADLINE_EXCEEDED, OUTCOME_NOT_SENT)
    wire.near.cut()
    await wire.tasks[0]
    lost = commander.issue("d", "o", packed(), soon())
    with pytest.raises(RlctlError) as caught:
        await answer(lost)
    assert (caught.value.reason, caught.value.outcome) == (Reason.LINK_LOST, OUTCOME_NOT_SENT)
    assert wire.rank.carried_out == []


async def test_a_silent_peer_is_given_up(wire: Wire) -> None:
    commander = wire.connect(silence_s=0.1)
    wire.far.muted = True
    issued = commander.issue("c", "o", packed(), soon(30))
    with pytest.raises(RlctlError) as caught:
        await answer(issued)
    assert caught.value.reason is Reason.LINK_LOST
    assert commander.lost


async def test_a_peer_that_takes_long_to_attach_is_not_silent(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    # A follower loads its engine, for minutes, before it answers.
    monkeypatch.setattr(commanding, "PING_EVERY_S", 0.05)
    commander = wire.connect(silence_s=0.5)
    wire.rank.loaded.clear()
    attaching = asyncio.create_task(commander.attach(Attach(incarnation=4)))
    heard = commander.last_heard
    async with asyncio.timeout(5.0):
        await eventually(lambda: commander.lost or commander.last_heard > heard + 1.0)
    assert not commander.lost
    wire.rank.loaded.set()
    assert (await attaching).report.incarnation == 4


async def test_a_peer_that_starts_an_engine_may_be_silent_for_longer(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commanding, "PING_EVERY_S", 0.02)
    commander = wire.connect(silence_s=0.05, starting_s=0.3)
    wire.far.muted = True
    started = CLOCK.now()
    with pytest.raises(RlctlError) as caught:
        await asyncio.wait_for(commander.attach(Attach(incarnation=4)), 5.0)
    assert caught.value.reason is Reason.LINK_LOST
    assert CLOCK.now() - started > 0.3


async def test_who_was_stopped_takes_nobody_for_silent(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_s = 0.0

    class Clock(SystemClock):
        def now(self) -> float:
            return super().now() + stopped_s

    monkeypatch.setattr(commanding, "PING_EVERY_S", 0.05)
    commander = wire.connect(Clock())
    heard, stopped_s = commander.last_heard, 60.0
    await eventually(lambda: commander.lost or commander.last_heard > heard)
    await answer(commander.issue("c", "o", packed(), soon(120)))


async def test_an_attach_is_accepted_or_raises_the_refusal(wire: Wire) -> None:
    commander = wire.connect()
    assert (await commander.attach(Attach(incarnation=4))).report.incarnation == 4
    with pytest.raises(RlctlError, match="over") as caught:
        await commander.attach(Attach(fleet_epoch=13))
    assert caught.value.reason is Reason.EPOCH_FENCED
    async with asyncio.timeout(5.0):
        with pytest.raises(RlctlError, match="OSError: no room on the device"):
            await commander.attach(Attach(fleet_epoch=14))


async def test_commands_grants_and_cancellations_of_a_stranger_are_refused(wire: Wire) -> None:
    commander = wire.connect()
    wire.rank.strangers.append(wire.far)
    commander.grant(ServingGrant(lease=Duration(seconds=7)))
    result = await answer(commander.issue("c", "o", packed(), soon()))
    assert (result.rank.outcome, result.rank.error.reason) == (OUTCOME_REJECTED, "EPOCH_FENCED")
    commander.cancel("another's")
    await answer(commander.issue("d", "o", packed(), soon()))
    assert (wire.rank.carried_out, wire.rank.withdrawn) == ([], [])
    assert not hasattr(wire.rank, "lease")
    # It was not recorded either: the commander that is accepted is obeyed under the same id.
    assert (await answer(wire.connect().issue("c", "o", packed(), soon()))).rank.outcome == OUTCOME_APPLIED


async def test_long_results_of_reads_are_kept_up_to_a_limit(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeat after a broken link must not run at some ranks of a stage only."""
    monkeypatch.setattr(executing, "LARGE_BYTES", 250_000)
    wire.rank.says = "x" * 100_000
    commander = wire.connect()
    requests = {"read": v.GetModelInfoRequest(), "check": v.CheckWeightsRequest(), "write": v.PauseGenerationRequest()}
    for _ in range(2):
        for name, request in requests.items():
            result = await answer(commander.issue(name, "o", packed(request), soon()))
            assert len(result.rank.model_info.model_path) == 100_000
    assert wire.rank.carried_out == ["read", "check", "write"]
    await answer(commander.issue("another", "o", packed(v.CheckWeightsRequest()), soon()))
    assert list(wire.executor._records) == ["check", "write", "another"]
    monkeypatch.setattr(executing, "LARGE_BYTES", 1)
    await answer(commander.issue("last", "o", packed(v.CheckWeightsRequest()), soon()))
    assert list(wire.executor._records) == ["write", "last"], "the latest result is kept at any length"
    await answer(commander.issue("read", "o", packed(requests["read"]), soon()))
    assert wire.rank.carried_out == ["read", "check", "write", "another", "last", "read"]
    assert list(wire.executor._large) == ["read"]


@pytest.mark.parametrize(
    ("request_", "outcome"),
    [(v.CheckWeightsRequest(), OUTCOME_REJECTED), (v.PauseGenerationRequest(), OUTCOME_UNKNOWN)],
)
async def test_an_answer_that_would_break_the_stream_is_refused(
    wire: Wire, request_: Message, outcome: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executing, "MOST_BYTES", 1000)
    wire.rank.says = "x" * 1000
    commander = wire.connect()
    for _ in range(2):
        result = (await answer(commander.issue("c", "o", packed(request_), soon()))).rank
        assert (result.outcome, result.error.reason) == (outcome, "MESSAGE_TOO_LARGE")
    assert wire.rank.carried_out == ["c"]
    wire.rank.says = "x" * 900
    assert (await answer(commander.issue("d", "o", packed(request_), soon()))).rank.outcome == OUTCOME_APPLIED


async def test_the_last_results_are_kept_and_what_runs_is(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executing, "REMEMBERED", 3)
    commander = wire.connect()
    wire.rank.gate.clear()
    running = commander.issue("running", "o", packed(), soon())
    await running.accepted
    wire.rank.gate = asyncio.Event()
    wire.rank.gate.set()
    wire.rank.says = "first"
    for name in "abc":
        await answer(commander.issue(name, "o", packed(), soon()))
    wire.rank.says = "later"
    assert list(wire.executor._records) == ["running", "b", "c"]
    for name, said in (("c", "first"), ("b", "first"), ("a", "later")):
        result = await wire.executor.execute(name, packed(), 5.0)
        assert (result.rank.outcome, result.rank.model_info.model_path) == (OUTCOME_APPLIED, said)
    assert wire.rank.carried_out == ["a", "b", "c", "a"]


async def test_an_unknown_verb_and_garbage_are_refused(wire: Wire) -> None:
    commander = wire.connect()
    for body, reason in (
        (Any(type_url="type.googleapis.com/rlctl.v1.NoSuchRequest"), "VERB_UNKNOWN"),
        (Any(type_url="type.googleapis.com/google.protobuf.Duration"), "VERB_UNKNOWN"),
        (Any(type_url="type.googleapis.com/rlctl.v1.Operation"), "VERB_UNKNOWN"),
        (Any(), "VERB_UNKNOWN"),
        (Any(type_url="type.googleapis.com/rlctl.v1.PauseGenerationRequest", value=b"\xff\xff"), "FIELD_INVALID"),
    ):
        issued = commander.issue(f"c{body.value!r}{body.type_url}", "o", body, soon())
        assert (await answer(issued)).rank.error.reason == reason
    assert wire.rank.carried_out == []


@pytest.mark.parametrize(
    ("request_", "outcome"),
    [(v.PauseGenerationRequest(), OUTCOME_UNKNOWN), (v.GetModelInfoRequest(), OUTCOME_REJECTED)],
    ids=["it changes something", "it reads"],
)
async def test_a_defect_is_an_answer_and_not_a_silence(wire: Wire, request_: Message, outcome: int) -> None:
    wire.rank.defects = {"c"}
    for _ in ("carried out", "as it is remembered"):
        result = await answer(wire.connect().issue("c", "o", packed(request_), soon()))
        assert (result.rank.outcome, result.rank.error.reason) == (outcome, "INTERNAL")
        assert result.rank.error.message == "TypeError: no such thing"
    assert wire.rank.carried_out == ["c"]


async def test_a_callers_leaving_does_not_stop_what_runs(wire: Wire) -> None:
    wire.rank.gate.clear()
    caller = asyncio.create_task(wire.executor.execute("c", packed(), 5.0))
    await eventually(lambda: wire.executor._records)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)
    wire.rank.gate.set()
    assert (await wire.executor.execute("c", packed(), 5.0)).rank.outcome == OUTCOME_APPLIED
    assert wire.rank.carried_out == ["c"]


async def test_commands_beyond_the_bound_are_not_sent(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commanding, "MOST_PENDING", 2)
    commander = wire.connect()
    await commander.attach(Attach())
    wire.rank.gate.clear()
    issued = [commander.issue(f"c{number}", "o", packed(), soon()) for number in range(2)]
    with pytest.raises(RlctlError) as caught:
        await commander.issue("c2", "o", packed(), soon()).result
    assert (caught.value.reason, caught.value.outcome) == (Reason.TOO_MANY_REQUESTS, OUTCOME_NOT_SENT)
    assert commander.issue("c0", "o", packed(), soon()) is issued[0], "a repeat is no further command"
    wire.rank.gate.set()
    await asyncio.gather(*(each.result for each in issued))
    await commander.issue("c2", "o", packed(), soon()).result
    assert wire.rank.carried_out == ["c0", "c1", "c2"]
