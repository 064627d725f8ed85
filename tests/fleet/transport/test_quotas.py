"""Quotas of requests in flight: at stages, and of operations at the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from scraping import scrape
from waiting import eventually

from rlctl.contract import quotas
from rlctl.contract.errors import QuotaExceeded, Reason, RlctlError
from rlctl.contract.scopes import Grant, Principal
from rlctl.engine import Call
from rlctl.sdk import aio
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport import access_file
from rlctl.transport.access_file import Entry, TokenHash, hash_of
from rlctl.transport.channel import OnBehalf, bearer, open_channel
from rlctl.transport.status import from_grpc
from rlctl.v1 import rollout_pb2, update_pb2
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

TOKEN = "the fleet's own token"
SCOPES = {"sampler": "rollout", "other": "rollout", "trainer": "weights", "boss": "admin", "front": "gateway"}


def write(path: Path, *, default: int | None = None, **limits: int) -> None:
    """Write an access file in which the token of each principal is its name."""
    entries = {
        name: Entry(name, (Grant.parse(scope),), (TokenHash(hash_of(name), 0.0),), (), limits.get(name))
        for name, scope in SCOPES.items()
    }
    access_file.write(path, entries, max_in_flight=default)


@pytest.fixture
def access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(access_file, "LOOK_S", 0.0)
    path = tmp_path / "access.json"
    write(path, sampler=2, trainer=1)
    return path


@pytest.fixture
async def fleet(make_fleet: Callable[..., Any], access: Path) -> AsyncIterator[InProcessFleet]:
    async with make_fleet(token=TOKEN, access_file=str(access), a=1) as fleet:
        yield fleet


@pytest.fixture
async def stage(fleet: InProcessFleet) -> AsyncIterator[RolloutServiceStub]:
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        yield RolloutServiceStub(channel)


def running(fleet: InProcessFleet) -> int:
    return len(fleet.stages["a"]._engine._running)  # type: ignore[attr-defined]


def counted(fleet: InProcessFleet) -> dict[str, int]:
    placed = fleet.stages["a"]._quotas
    assert placed is not None
    return dict(placed._in_flight)


def request(tokens: int = 100_000, rid: str = "") -> rollout_pb2.GenerateRequest:
    return rollout_pb2.GenerateRequest(text="x", rid=rid, sampling_params={"max_new_tokens": tokens})


async def reason_of(call: Any) -> Reason | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return from_grpc(error).reason
    return None


@contextlib.asynccontextmanager
async def held(fleet: InProcessFleet, stub: RolloutServiceStub, number: int, caller: str) -> AsyncIterator[list[Any]]:
    """Requests of a caller that run at the engine."""
    before = running(fleet)
    calls = [stub.Generate(request(), metadata=bearer(caller)) for _ in range(number)]
    await eventually(lambda: running(fleet) == before + number)
    try:
        yield calls
    finally:
        for call in calls:
            call.cancel()


async def test_a_third_request_is_refused_at_once_with_principal_limit_and_next_step(
    fleet: InProcessFleet, stage: RolloutServiceStub
) -> None:
    mine = bearer("sampler")
    async with held(fleet, stage, 2, "sampler"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stage.Generate(request(1), metadata=mine)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = from_grpc(caught.value)
        assert isinstance(error, QuotaExceeded)
        assert error.metadata == {"principal": "sampler", "limit": "2"}
        assert error.message == "sampler has 2 requests in flight at this server; the quota is 2"
        assert "rlctl tokens limit" in error.next_step
        stream = stage.GenerateStream(request(1), metadata=mine)
        assert await reason_of(stream.read()) is Reason.QUOTA_EXCEEDED
        assert running(fleet) == 2, "no refused request reached the engine"
        assert await reason_of(stage.Generate(request(1), metadata=bearer("other"))) is None, "quotas are separate"
        assert await reason_of(stage.Generate(request(1), metadata=bearer(TOKEN))) is None


async def test_a_stream_of_many_requests_counts_each_and_goes_on_after_a_refusal(
    fleet: InProcessFleet, stage: RolloutServiceStub
) -> None:
    stream = stage.GenerateMany(metadata=bearer("sampler"))
    begin = rollout_pb2.GenerateManyRequest()
    for number in (1, 2, 3):
        begin.begin.add(number=number, request=request())
    await stream.write(begin)

    async def ended() -> Any:
        while True:
            for part in (await stream.read()).parts:
                if part.ended:
                    return part

    refused = await asyncio.wait_for(ended(), 5)
    assert (refused.number, refused.error.reason) == (3, "QUOTA_EXCEEDED")
    await stream.write(rollout_pb2.GenerateManyRequest(leave=[1]))
    await eventually(lambda: counted(fleet) == {"sampler": 1})
    again = rollout_pb2.GenerateManyRequest()
    again.begin.add(number=4, request=request(1))
    await stream.write(again)
    done = await asyncio.wait_for(ended(), 5)
    assert (done.number, done.error.reason) == (4, "")
    stream.cancel()
    await eventually(lambda: counted(fleet) == {})


async def test_every_end_of_a_request_frees_its_place(fleet: InProcessFleet, stage: RolloutServiceStub) -> None:
    mine = bearer("sampler")

    async def fails(call: Any) -> None:
        assert await reason_of(call) is not None

    async def disconnected() -> None:
        async with held(fleet, stage, 2, "sampler"):
            pass

    async def ended_stream() -> None:
        stream = stage.GenerateStream(request(2), metadata=mine)
        while await stream.read() is not grpc.aio.EOF:
            pass

    async def aborted() -> None:
        calls = [stage.Generate(request(rid=f"r{number}"), metadata=mine) for number in range(2)]
        await eventually(lambda: running(fleet) == 2)
        # Neither an abort nor its RPC counts.
        await stage.Abort(rollout_pb2.AbortRequest(rids=["r0", "r1"]), metadata=mine)
        await asyncio.gather(*calls)

    ends: dict[str, Callable[[], Any]] = {
        "complete": lambda: stage.Generate(request(1), metadata=mine),
        "stream": ended_stream,
        "abort": aborted,
        "disconnect": disconnected,
        "deadline": lambda: fails(stage.Generate(request(), metadata=mine, timeout=0.2)),
        "error": lambda: fails(stage.Generate(rollout_pb2.GenerateRequest(text="x", adapter="absent"), metadata=mine)),
    }
    for end in ends.values():
        await end()
        await eventually(lambda: counted(fleet) == {})
    async with held(fleet, stage, 2, "sampler"):
        assert counted(fleet) == {"sampler": 2}


async def test_a_changed_quota_applies_to_later_requests(
    fleet: InProcessFleet, stage: RolloutServiceStub, access: Path
) -> None:
    mine = bearer("sampler")
    stream = stage.GenerateMany(metadata=mine)  # longer than the change: later requests obey it
    begin = rollout_pb2.GenerateManyRequest()
    begin.begin.add(number=1, request=request())
    await stream.write(begin)
    async with held(fleet, stage, 1, "sampler"):
        await eventually(lambda: running(fleet) == 2)
        write(access, sampler=4)
        assert await reason_of(stage.Generate(request(1), metadata=mine)) is None
        write(access, sampler=1)
        assert await reason_of(stage.Generate(request(1), metadata=mine)) is Reason.QUOTA_EXCEEDED
        more = rollout_pb2.GenerateManyRequest()
        more.begin.add(number=2, request=request(1))
        await stream.write(more)
        refused = ""
        while not refused:
            parts = (await asyncio.wait_for(stream.read(), 5)).parts
            refused = next((part.error.reason for part in parts if part.number == 2 and part.ended), "")
        assert refused == "QUOTA_EXCEEDED"
        assert running(fleet) == 2, "requests in flight go on"
        write(access)
        assert await reason_of(stage.Generate(request(1), metadata=mine)) is None
        write(access, default=2)
        assert await reason_of(stage.Generate(request(1), metadata=mine)) is Reason.QUOTA_EXCEEDED
        write(access, default=2, sampler=3)
        assert await reason_of(stage.Generate(request(1), metadata=mine)) is None, "its own quota takes precedence"
    stream.cancel()


async def test_a_gateway_that_speaks_for_callers_does_not_use_their_places_or_its_own_twice(
    fleet: InProcessFleet, stage: RolloutServiceStub, access: Path
) -> None:
    write(access, sampler=1, other=1, front=1)
    behalf = {name: bearer(OnBehalf("front", name)) for name in ("sampler", "other")}
    calls = [stage.Generate(request(), metadata=metadata) for metadata in behalf.values()]
    await eventually(lambda: running(fleet) == 2)
    assert counted(fleet) == {"sampler": 1, "other": 1}, "not the gateway"
    for metadata in (*behalf.values(), bearer("sampler")):
        assert await reason_of(stage.Generate(request(1), metadata=metadata)) is Reason.QUOTA_EXCEEDED
    for call in calls:
        call.cancel()


async def test_a_refusal_is_logged_as_a_denied_call_and_counted(
    make_fleet: Callable[..., Any], access: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_fleet(token=TOKEN, access_file=str(access), metrics="127.0.0.1:0", a=1) as fleet:
        async with open_channel(fleet.stages["a"].rollout_address) as channel:
            stage = RolloutServiceStub(channel)
            async with held(fleet, stage, 2, "sampler"):
                for _ in range(5):
                    call = stage.Generate(request(1), metadata=bearer("sampler"))
                    assert await reason_of(call) is Reason.QUOTA_EXCEEDED
        metrics = await scrape(fleet.stages["a"].metrics_address)
        assert metrics.value("rlctl_quota_refusals_total", principal="sampler") == 5
        assert metrics.value("rlctl_generation_requests_total", outcome="QUOTA_EXCEEDED") == 5
    lines = [record.getMessage() for record in caplog.records if "QUOTA_EXCEEDED" in record.getMessage()]
    assert [line.partition(": ")[0] for line in lines] == ["generation from 127.0.0.1 denied"]


# The coordinator.

ABORT = v.AbortRequestsRequest(header=RequestHeader(target=Target(slots=["a"])), abort_all=True)


async def refusal(call: Any) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        await call
    return caught.value


@contextlib.asynccontextmanager
async def blocked(fleet: InProcessFleet, *methods: str) -> AsyncIterator[None]:
    """The engine does not end these verbs until the block ends."""
    release = asyncio.Event()

    async def block(_engine: FakeEngine, method: str, _call: Call) -> None:
        if method in methods:
            await release.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = block
    try:
        yield
    finally:
        release.set()


async def test_operations_under_way_have_a_quota_that_abort_pause_and_continue_pass(
    fleet: InProcessFleet, access: Path
) -> None:
    header = RequestHeader(target=Target(slots=["a"]))
    coordinator = fleet.server.coordinator
    async with (
        await aio.connect(fleet.server.address, token="trainer") as trainer,
        await aio.connect(fleet.server.address, token="boss") as boss,
    ):
        begin = update_pb2.BeginWeightUpdateRequest(model="actor", version="step-1")
        plan = await trainer.connection.call("BeginWeightUpdate", begin, 10.0)
        destroy = v.DestroyWeightsUpdateGroupRequest(header=header, group_name="g")
        refused = await refusal(trainer.call(destroy))
        assert refused.reason is Reason.QUOTA_EXCEEDED
        assert refused.message == "trainer has 1 operations under way; the quota is 1"
        assert refused.metadata == {"principal": "trainer", "limit": "1"}
        fenced = RequestHeader(target=Target(slots=["a"]))
        fenced.fence.update_id = plan.update_id
        assert await trainer.call(v.PauseGenerationRequest(header=fenced)), "a step of the update"
        assert await trainer.call(v.FlushCacheRequest(header=fenced)), "a step of the update"
        assert await trainer.call(ABORT)
        assert (await boss.call(ABORT)).caller.principal == "boss"
        await trainer.abort_update(plan.update_id)
        assert await trainer.call(destroy, check=False), "the place is free after the update"
        denied = await boss.audit(denied=True)
        assert [(each.caller.principal, each.method, each.reason) for each in denied] == [
            ("trainer", "DestroyWeightsUpdateGroup", "QUOTA_EXCEEDED")
        ]
    assert coordinator.operations.running() == []


async def test_a_refused_operation_changes_nothing_and_a_repeat_is_no_further_operation(fleet: InProcessFleet) -> None:
    async with await aio.connect(fleet.server.address, token="trainer") as trainer:
        async with blocked(fleet, "flush_cache"):
            flush = v.FlushCacheRequest(header=RequestHeader(target=Target(slots=["a"]), request_id=fleet_id(fleet)))
            first = asyncio.create_task(trainer.call(flush))
            operations = fleet.server.coordinator.operations
            await eventually(lambda: len(operations.running()) == 1)
            repeat = asyncio.create_task(trainer.call(flush))
            begin = update_pb2.BeginWeightUpdateRequest(model="actor", version="step-1")
            call = trainer.connection.call("BeginWeightUpdate", begin, 10.0)
            assert (await refusal(call)).reason is Reason.QUOTA_EXCEEDED
            assert fleet.server.coordinator.roster.model("actor").update_id == ""
            checked = v.UpdateWeightsFromDiskRequest(model_path=fleet.specs[0].model_path)
            assert (await refusal(trainer.call(checked))).reason is Reason.QUOTA_EXCEEDED
        done, again = await asyncio.gather(first, repeat)
        assert again.operation_id == done.operation_id
        assert again.replayed
        assert len(await trainer.operations()) == 1


def fleet_id(fleet: InProcessFleet) -> str:
    return fleet.server.coordinator.operations.new_id()


async def test_a_newer_trainer_replaces_its_own_update_within_a_quota_of_one(fleet: InProcessFleet) -> None:
    async with await aio.connect(fleet.server.address, token="trainer") as trainer:
        for incarnation in (1, 2):
            begin = update_pb2.BeginWeightUpdateRequest(model="actor", version=f"step-{incarnation}")
            begin.trainer.name, begin.trainer.incarnation = "t", incarnation
            plan = await trainer.connection.call("BeginWeightUpdate", begin, 10.0)
        [running_update] = fleet.server.coordinator.operations.running()
        assert running_update.operation_id == plan.update_id
        await trainer.abort_update(plan.update_id)


async def test_a_principal_without_a_quota_cannot_fill_the_coordinator(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MOST_OPERATIONS", 1)
    header = RequestHeader(target=Target(slots=["a"]))
    async with await aio.connect(fleet.server.address, token="boss") as boss:
        for method, first, more in (
            ("flush_cache", v.FlushCacheRequest(header=header), v.ReleaseMemoryRequest(header=header)),
            ("pause_generation", v.PauseGenerationRequest(header=header), ABORT),
        ):
            async with blocked(fleet, method):
                call = asyncio.create_task(boss.call(first))
                await eventually(lambda: len(fleet.server.coordinator.operations.running()) == 1)
                assert (await refusal(boss.call(more))).reason is Reason.QUOTA_EXCEEDED
                assert more is ABORT or await boss.call(ABORT), "counted apart"
            await call


async def test_reads_of_stages_are_bounded_for_each_principal(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "MOST_READS", 1)
    read = v.GetModelInfoRequest()
    async with (
        await aio.connect(fleet.server.address, token="boss") as boss,
        await aio.connect(fleet.server.address, token="trainer") as trainer,
    ):
        async with blocked(fleet, "get_model_info"):
            first = asyncio.create_task(boss.call(read))
            await eventually(lambda: fleet.server.coordinator._carrier._reads == {"boss": 1})
            refused = await refusal(boss.call(read))
            assert refused.message == "boss has 1 reads of stages under way; the limit of each principal is 1"
            assert "tokens limit" not in refused.next_step, "no other quota would help"
            other = asyncio.create_task(trainer.call(read))
            await eventually(lambda: len(fleet.server.coordinator._carrier._reads) == 2)
        await asyncio.gather(first, other)
        assert await boss.call(read)
        assert fleet.server.coordinator._carrier._reads == {}


async def test_a_full_stage_refuses_requests_of_all_principals_and_the_sdk_waits(
    fleet: InProcessFleet, stage: RolloutServiceStub
) -> None:
    stage_quotas = fleet.stages["a"]._quotas
    assert stage_quotas is not None
    stage_quotas._most = 2
    async with await aio.connect(fleet.server.address, token="boss") as boss:
        async with held(fleet, stage, 2, "sampler"):
            assert await reason_of(stage.Generate(request(1), metadata=bearer("other"))) is Reason.TOO_MANY_REQUESTS
            sample = asyncio.create_task(boss.rollout("actor").generate("x", max_new_tokens=1))
            await asyncio.sleep(0.2)
            assert not sample.done()
        assert len(await asyncio.wait_for(sample, 5)) == 1
        await eventually(lambda: counted(fleet) == {})


def test_a_quota_of_the_file_is_checked(access: Path) -> None:
    for wrong in ("0", "-1", "true", "1.5", '"2"', "1000001"):
        access.write_text(f'{{"version": 1, "max_in_flight": {wrong}, "principals": []}}')
        with pytest.raises(Exception, match="max_in_flight"):
            access_file.read(access)
        access.write_text(f'{{"version": 1, "principals": [{{"name": "x", "scopes": [], "max_in_flight": {wrong}}}]}}')
        with pytest.raises(Exception, match=r"principals\[0\].max_in_flight"):
            access_file.read(access)


def test_the_decision_is_all_or_none() -> None:
    principal = Principal("p", frozenset(), 3)
    assert quotas.excess(principal, 2) is None
    assert quotas.excess(principal, 0, 3) is None
    refused = quotas.excess(principal, 1, 3)
    assert refused is not None
    assert refused.message == "p has 1 requests in flight at this server, and this call has 3; the quota is 3"
    assert quotas.excess(Principal("p", frozenset()), 10**9) is None


def test_a_large_quota_does_not_raise_the_limit_of_operations() -> None:
    for limit, relieves in ((None, False), (None, True), (quotas.LARGEST, False), (1, True)):
        principal = Principal("p", frozenset(), limit)
        assert quotas.excess_operations(principal, quotas.MOST_OPERATIONS - 1, relieves=relieves) is None
        refused = quotas.excess_operations(principal, quotas.MOST_OPERATIONS, relieves=relieves)
        assert refused is not None
        assert refused.message == "p has 4096 operations under way; the limit of each principal is 4096"
        assert "tokens limit" not in refused.next_step
    refused = quotas.excess_operations(Principal("p", frozenset(), 7), 7, relieves=False)
    assert refused is not None
    assert refused.message == "p has 7 operations under way; the quota is 7"
    assert "tokens limit" in refused.next_step
