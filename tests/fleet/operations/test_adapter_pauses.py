"""A pause by name of one adapter stops its requests and no others, and is the fleet's as every pause by name is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc.aio
import pytest
from fleet_steps import cut_off, kill, on_record, restart_coordinator
from updating import fault, refusal
from waiting import eventually

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.healing.orphans import Orphans
from rlctl.coordinator.pauses import pause as pausing
from rlctl.coordinator.pauses import pause_expiry
from rlctl.engine import Call, EngineInfo
from rlctl.sdk import aio
from rlctl.stage.state_machine import Stage
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.transport.channel import open_channel
from rlctl.transport.status import from_grpc
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, OPERATION_STATE_PARTIAL, Operation
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

ABORT, RETRACT, IN_PLACE, DRAIN = (
    common.PAUSE_MODE_ABORT,
    common.PAUSE_MODE_RETRACT,
    common.PAUSE_MODE_IN_PLACE,
    common.PAUSE_MODE_DRAIN,
)

UNREACHABLE = common.STAGE_STATE_UNREACHABLE

OTHERS = ("", "code")
"""The base, and an adapter that is not paused."""


@pytest.fixture
async def fleet(make_fleet: Callable[..., Any], checkpoint: Callable[[str], str]) -> AsyncIterator[InProcessFleet]:
    """Stages a and b, with the adapters math and code."""
    async with make_fleet(a=1, b=1) as fleet:
        await load_both(fleet, checkpoint)
        yield fleet


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause_expiry, "LOOK_S", 0.05)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Slots of which the gate has been open for math at any change since the set was cleared."""
    open_: set[str] = set()
    changed = Stage._changed

    def look(self: Stage, **how: bool) -> None:
        changed(self, **how)
        with contextlib.suppress(RlctlError):
            self.serving.refuse(self._clock, adapter="math")
            open_.add(self.registration.slot)

    monkeypatch.setattr(Stage, "_changed", look)
    return open_


async def load_both(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    for name in ("math", "code"):
        load = v.LoadAdapterRequest(name=name, path=checkpoint(name), version=f"{name}-1")
        assert (await fleet.stub.LoadAdapter(load)).state == OPERATION_STATE_OK


async def pause(fleet: InProcessFleet, *slots: str, mode: int = RETRACT, **fields: Any) -> Operation:
    request = v.PauseGenerationRequest(
        header=RequestHeader(target=Target(slots=slots)),
        mode=mode,  # type: ignore[arg-type]
        **{"adapter": "math", **fields},
    )
    operation: Operation = await fleet.stub.PauseGeneration(request)
    assert operation.state == OPERATION_STATE_OK, operation
    return operation


async def go_on(fleet: InProcessFleet, *slots: str, adapter: str = "math") -> Operation:
    header = RequestHeader(target=Target(slots=slots))
    request = v.ContinueGenerationRequest(header=header, adapter=adapter)
    operation: Operation = await fleet.stub.ContinueGeneration(request)
    assert operation.state == OPERATION_STATE_OK, operation
    return operation


class Generating:
    """A request at one stage, and how many tokens it has had."""

    def __init__(self, fleet: InProcessFleet, slot: str, adapter: str, tokens: int = 100_000) -> None:
        self.tokens = 0
        self.end = rollout.FINISH_TYPE_UNSPECIFIED
        self._address = fleet.stage(slot).registration.rollout_address
        params = rollout.SamplingParams(max_new_tokens=tokens)
        self._request = rollout.GenerateRequest(text="x", adapter=adapter, sampling_params=params)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with open_channel(self._address) as channel:
            async for part in RolloutServiceStub(channel).GenerateStream(self._request):
                self.tokens += len(part.samples[0].output_ids)
                if part.samples[0].HasField("finish_reason"):
                    self.end = part.samples[0].finish_reason.type

    async def goes_on(self, count: int = 20) -> None:
        """Return after so many more tokens."""
        before = self.tokens
        await eventually(lambda: self.tokens >= before + count)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def served_by(fleet: InProcessFleet, slot: str, adapter: str) -> bool:
    """Whether a stage takes a request with an adapter. Another refusal than that of a pause fails the test."""
    request = Generating(fleet, slot, adapter, tokens=1)
    try:
        await request.task
    except grpc.aio.AioRpcError as error:
        if from_grpc(error).reason is not Reason.STAGE_NOT_SERVING:
            raise
        return False
    return True


async def only_math_stands_still(fleet: InProcessFleet, *slots: str) -> None:
    """It is paused at these stages and reported so; the others serve on."""
    await eventually(lambda: all(paused(fleet, slot) == ["math"] for slot in slots))
    for slot in slots:
        await fleet.until(lambda _, slot=slot: fleet.stage(slot).routable)
        assert not await served_by(fleet, slot, "math")
        for name in OTHERS:
            await eventually_served(fleet, slot, name)


def paused(fleet: InProcessFleet, slot: str) -> list[str]:
    """What a stage's engine keeps paused, which must be what the stage reports."""
    if slot not in fleet.stages:
        return []
    stage = next((s for s in fleet.server.coordinator.roster.fleet().stages if s.registration.slot == slot), None)
    reported = [each.name for each in stage.report.paused_adapters] if stage is not None else []
    held = sorted(fleet.stages[slot]._engine.paused_adapters)  # type: ignore[attr-defined]
    return reported if reported == held else ["<in between>"]


@pytest.mark.parametrize("mode", [ABORT, RETRACT, IN_PLACE, DRAIN])
async def test_only_the_requests_with_the_adapter_stop(fleet: InProcessFleet, mode: int) -> None:
    using = Generating(fleet, "a", "math", tokens=200 if mode == DRAIN else 100_000)
    beside = [Generating(fleet, "a", name) for name in OTHERS]
    for each in (using, *beside):
        await each.goes_on()
    await pause(fleet, mode=mode)
    before = using.tokens
    for each in beside:
        await each.goes_on()
    await only_math_stands_still(fleet, "a", "b")
    assert using.tokens == before
    if mode in (ABORT, DRAIN):
        await using.task
        assert using.end == (rollout.FINISH_TYPE_ABORT if mode == ABORT else rollout.FINISH_TYPE_LENGTH)
        assert mode == ABORT or using.tokens == 200
    await go_on(fleet)
    if mode not in (ABORT, DRAIN):
        await using.goes_on()
    assert all([await served_by(fleet, slot, "math") for slot in "ab"])
    for each in (using, *beside):
        await each.stop()


async def test_it_is_shown_with_who_when_and_why(fleet: InProcessFleet) -> None:
    operation = await pause(fleet, "a", by="ops@host", reason="bad eval", ttl=duration(600))
    stage = fleet.stage("a")
    (kept,) = stage.adapter_pauses
    assert (kept.operation_id, kept.adapter, kept.mode) == (operation.operation_id, "math", RETRACT)
    assert (kept.by, kept.reason, kept.since) == ("ops@host", "bad eval", operation.create_time)
    assert kept.HasField("until")
    assert not stage.HasField("pause")
    assert stage.routable
    assert not fleet.stage("b").adapter_pauses


async def test_a_pause_of_all_requests_and_one_of_an_adapter_do_not_end_each_other(fleet: InProcessFleet) -> None:
    everything = await pause(fleet, adapter="")
    math = await pause(fleet)
    assert on_record(fleet) == [everything.operation_id, math.operation_id]
    await go_on(fleet)
    assert on_record(fleet) == [everything.operation_id]
    assert fleet.stage("a").state == common.STAGE_STATE_PAUSED
    math = await pause(fleet)
    await go_on(fleet, adapter="")
    assert on_record(fleet) == [math.operation_id]
    await only_math_stands_still(fleet, "a", "b")
    code = await pause(fleet, adapter="code")
    assert on_record(fleet) == [math.operation_id, code.operation_id]
    await go_on(fleet)
    assert await served_by(fleet, "a", "math")
    assert not await served_by(fleet, "a", "code")


async def test_an_engine_that_comes_back_has_the_adapter_paused_before_it_serves_it(
    fleet: InProcessFleet, served: set[str]
) -> None:
    await pause(fleet)
    spec = await kill(fleet, "a")
    served.clear()
    await fleet.start_stage(spec)
    await is_back(fleet, "a")
    await only_math_stands_still(fleet, "a", "b")
    assert served == set()
    await go_on(fleet)
    await eventually_served(fleet, "a")


async def is_back(fleet: InProcessFleet, slot: str) -> None:
    """Wait until a stage that was started again serves, and holds its adapters."""
    await fleet.until(lambda _: fleet.stage(slot).routable and len(fleet.stage(slot).report.adapters) == 2)


async def eventually_served(fleet: InProcessFleet, slot: str, adapter: str = "math") -> None:
    async with asyncio.timeout(10):
        while not await served_by(fleet, slot, adapter):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_it_outlives_the_coordinator(fleet: InProcessFleet, served: set[str]) -> None:
    await pause(fleet)
    spec = await kill(fleet, "a")
    await restart_coordinator(fleet)
    served.clear()
    await fleet.start_stage(spec)
    await is_back(fleet, "a")
    await only_math_stands_still(fleet, "a", "b")
    assert served == set()


async def test_a_stage_that_is_cut_off_has_stopped_before_the_pause_is_ok(
    make_fleet: Callable[..., Any],
    checkpoint: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    served: set[str],
) -> None:
    async with make_fleet(a=1, b=1, lease_s=1.5) as fleet:
        await load_both(fleet, checkpoint)
        comes_back = await cut_off(fleet, "a", monkeypatch)
        stage = fleet.stages["a"]._stage
        stage.serving.refuse(stage._clock, adapter="math")  # it has a lease still
        operation = await pause(fleet)
        assert [(each.slot, each.reason) for each in operation.excluded] == [("a", pausing.PAUSED_LATER)]
        with pytest.raises(RlctlError, match="no serving lease"):
            stage.serving.refuse(stage._clock, adapter="math")
        served.clear()
        comes_back()
        await only_math_stands_still(fleet, "a", "b")
        assert served == set()


async def test_a_continue_reaches_a_stage_that_is_cut_off_when_it_returns(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pause(fleet)
    comes_back = await cut_off(fleet, "a", monkeypatch)
    await go_on(fleet)
    assert on_record(fleet) == []
    comes_back()
    await eventually(lambda: paused(fleet, "a") == [])
    await eventually_served(fleet, "a")


@pytest.mark.usefixtures("often")
async def test_it_ends_by_itself_and_leaves_an_older_one_in_force(fleet: InProcessFleet) -> None:
    older = await pause(fleet, "a")
    newer = await pause(fleet, ttl=duration(1))
    assert on_record(fleet) == [newer.operation_id], "the newer one covers all of the older one"
    await eventually(lambda: on_record(fleet) == [])
    await eventually(lambda: paused(fleet, "a") == [])
    older = await pause(fleet)
    await pause(fleet, "a", ttl=duration(1))
    await eventually(lambda: on_record(fleet) == [older.operation_id])
    await only_math_stands_still(fleet, "a", "b")


@pytest.mark.usefixtures("often")
async def test_its_end_needs_no_stage(fleet: InProcessFleet) -> None:
    await pause(fleet, ttl=duration(1))
    spec = await kill(fleet, "a")
    await eventually(lambda: on_record(fleet) == [])
    await eventually(lambda: paused(fleet, "b") == [])
    await fleet.start_stage(spec)
    await is_back(fleet, "a")
    await eventually_served(fleet, "a")


async def test_a_pause_that_was_taken_back_is_no_success_of_a_stage_that_is_about_to_continue(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_fleet(a=1, b=2) as fleet:
        await load_both(fleet, checkpoint)
        await pause(fleet)
        comes_back = await cut_off(fleet, "a", monkeypatch)
        await go_on(fleet)
        monkeypatch.setattr(Orphans, "look", lambda *_: None)  # the stage has not continued yet
        comes_back()
        await fleet.until(lambda stages: stages[0].state == common.STAGE_STATE_READY)
        assert fleet.server.coordinator.roster.slots["a"].unkept_adapters == ["math"]
        fault(fleet, 1, 2, "pause_generation", Reason.ENGINE_FAILED.error("no"))
        request = v.PauseGenerationRequest(adapter="math", mode=RETRACT)
        results = (await fleet.stub.PauseGeneration(request)).stage_results
        result = next(result for result in results if result.slot == "a")
        assert (result.outcome, result.error.reason) == (common.OUTCOME_REJECTED, "CANCELLED")
        assert "because b did not pause" in result.error.message


async def test_a_pause_that_a_target_refuses_is_taken_back(fleet: InProcessFleet) -> None:
    refusing = fleet.stages["b"]._engine

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if engine is refusing and name == "pause_generation":
            raise Reason.ENGINE_FAILED.error("no pause")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(adapter="math"))
    assert operation.state == OPERATION_STATE_FAILED
    assert on_record(fleet) == []
    for slot in "ab":
        assert paused(fleet, slot) == []
        assert await served_by(fleet, slot, "math")
    await pause(fleet, "a")
    operation = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(adapter="math"))
    assert operation.state == OPERATION_STATE_PARTIAL, "a was paused already"
    await only_math_stands_still(fleet, "a")


@pytest.fixture
def without_modes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Engines that start from now on have these pause modes for one adapter."""
    start = FakeEngine.start

    def have(*modes: int) -> None:
        async def changed(engine: FakeEngine, setup: Mapping[str, str]) -> EngineInfo:
            info = await start(engine, setup)
            info.capabilities.adapter_pause_modes[:] = modes  # type: ignore[arg-type]
            return info

        monkeypatch.setattr(FakeEngine, "start", changed)

    return have


async def test_an_engine_that_cannot_is_named_before_any_is_told(
    fleet: InProcessFleet, without_modes: Callable[..., None]
) -> None:
    told = []

    async def look(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "pause_generation":
            told.append(engine)

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = look
    for slot, modes, field in (("new", (), "adapter"), ("newer", (ABORT, DRAIN), "mode")):
        without_modes(*modes)
        fleet.specs.append(StageSpec(slot, fleet.specs[0].model_path))
        await fleet.start_stage(fleet.specs[-1])
        await fleet.until(lambda _, slot=slot: fleet.stage(slot).routable)
        header = RequestHeader(target=Target(slots=["a", slot]))
        for validate_only in (True, False):
            header.validate_only = validate_only
            request = v.PauseGenerationRequest(header=header, mode=RETRACT, adapter="math")
            error = await refusal(fleet.stub.PauseGeneration(request))
            assert (error.reason, error.field) == (Reason.UNSUPPORTED, field)
            assert slot in error.message
    assert (told, on_record(fleet), paused(fleet, "a")) == ([], [], [])
    await pause(fleet, "a", "newer", mode=DRAIN)


async def test_a_stage_that_joins_and_cannot_pause_it_serves_the_others_only(
    fleet: InProcessFleet, without_modes: Callable[..., None], served: set[str]
) -> None:
    await pause(fleet)
    without_modes()
    served.clear()
    fleet.specs.append(StageSpec("new", fleet.specs[0].model_path))
    await fleet.start_stage(fleet.specs[-1])
    await is_back(fleet, "new")
    for name in OTHERS:
        assert await served_by(fleet, "new", name)
    assert not await served_by(fleet, "new", "math")
    assert served == set()
    await go_on(fleet, "a", "b")
    assert not await served_by(fleet, "new", "math"), "the pause of all stages is in force for the others"
    await go_on(fleet)
    await eventually_served(fleet, "new")


async def test_a_stage_that_joins_without_the_mode_is_paused_in_another(
    fleet: InProcessFleet, without_modes: Callable[..., None]
) -> None:
    await pause(fleet)
    without_modes(DRAIN, ABORT)
    fleet.specs.append(StageSpec("new", fleet.specs[0].model_path))
    await fleet.start_stage(fleet.specs[-1])
    await is_back(fleet, "new")
    await only_math_stands_still(fleet, "new")
    assert [each.mode for each in fleet.stage("new").report.paused_adapters] == [DRAIN]


async def test_a_pause_that_is_due_withholds_the_adapter_while_the_engine_refuses_it(
    fleet: InProcessFleet, served: set[str]
) -> None:
    await pause(fleet)
    spec = await kill(fleet, "a")

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "pause_generation":
            raise Reason.ENGINE_FAILED.error("not now")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
    served.clear()
    await fleet.start_stage(spec)
    await is_back(fleet, "a")
    assert [await served_by(fleet, "a", name) for name in ("math", *OTHERS)] == [False, True, True]
    fake_engine.FAULTS.clear()
    await only_math_stands_still(fleet, "a")
    assert served == set()


@pytest.mark.parametrize("others", ["", "code"])
async def test_an_operation_on_others_does_not_release_an_adapter_whose_pause_is_due(
    fleet: InProcessFleet, served: set[str], others: str
) -> None:
    await pause(fleet)
    spec = await kill(fleet, "a")
    going = asyncio.Event()

    async def refuse(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "pause_generation":
            raise Reason.ENGINE_FAILED.error("not now")
        if name == "continue_generation":
            await going.wait()

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = refuse
    served.clear()
    await fleet.start_stage(spec)
    await is_back(fleet, "a")
    continuing = asyncio.create_task(go_on(fleet, adapter=others))
    slot = fleet.server.coordinator.roster.slots["a"]
    await eventually(lambda: slot.in_hand[others] == 1)
    number = fleet.server.coordinator._peers.grant(slot, confirm=True)
    await eventually(lambda: slot.report.grant_number >= number)
    assert not await served_by(fleet, "a", "math")
    going.set()
    await continuing
    assert served == set()


@pytest.mark.parametrize("earlier", ["pause_generation", "continue_generation"])
async def test_a_pause_holds_for_a_stage_that_returns_with_an_earlier_operation_under_way(
    make_fleet: Callable[..., Any],
    checkpoint: Callable[[str], str],
    served: set[str],
    monkeypatch: pytest.MonkeyPatch,
    earlier: str,
) -> None:
    """The pause does not address the stage, which had no link."""
    async with make_fleet(a=1, b=1, lease_s=1.5) as fleet:
        await load_both(fleet, checkpoint)
        if earlier == "continue_generation":
            await pause(fleet)
        running, may_run = asyncio.Event(), asyncio.Event()

        async def wait(engine: FakeEngine, name: str, call: Call) -> None:
            if name == earlier:
                running.set()
                await may_run.wait()

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = wait
        first = asyncio.create_task((pause if earlier == "pause_generation" else go_on)(fleet, "a"))
        await running.wait()
        fake_engine.FAULTS.clear()
        comes_back = await cut_off(fleet, "a", monkeypatch)
        newer = asyncio.create_task(pause(fleet))
        newer.add_done_callback(lambda _: served.clear())
        await eventually(lambda: fleet.stage("a").adapter_pauses == fleet.stage("b").adapter_pauses != [])
        comes_back()
        await fleet.until(lambda _: fleet.stage("a").state != UNREACHABLE)
        await asyncio.wait([newer], timeout=5.0)
        may_run.set()
        await first
        assert [each.slot for each in (await newer).excluded] == ["a"]
        await only_math_stands_still(fleet, "a", "b")
        assert served == set()


async def test_an_update_of_the_adapter_leaves_it_paused(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], served: set[str]
) -> None:
    using = Generating(fleet, "a", "math")
    await using.goes_on()
    await pause(fleet)
    served.clear()
    load = v.LoadAdapterRequest(name="math", path=checkpoint("new"), version="math-2")
    assert (await fleet.stub.LoadAdapter(load)).state == OPERATION_STATE_OK
    await only_math_stands_still(fleet, "a", "b")
    assert served == set()
    await go_on(fleet)
    await using.goes_on()
    await using.stop()
    for slot in "ab":
        assert await served_by(fleet, slot, "math")
        assert {each.version for each in fleet.stage(slot).report.adapters} == {"math-2", "code-1"}


async def test_an_adapter_that_is_unloaded_stays_paused_for_the_next_of_its_name(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], served: set[str]
) -> None:
    await pause(fleet)
    assert (await fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math"))).state == OPERATION_STATE_OK
    served.clear()
    load = v.LoadAdapterRequest(name="math", path=checkpoint("new"), version="math-2")
    assert (await fleet.stub.LoadAdapter(load)).state == OPERATION_STATE_OK
    await only_math_stands_still(fleet, "a", "b")
    assert served == set()


async def test_an_adapter_goes_on_at_a_stage_that_is_asleep(fleet: InProcessFleet) -> None:
    await pause(fleet)
    await pause(fleet, adapter="")
    sleep = v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_KV_CACHE])
    assert (await fleet.stub.ReleaseMemory(sleep)).state == OPERATION_STATE_OK
    await go_on(fleet)
    assert (paused(fleet, "a"), fleet.stage("a").state) == ([], common.STAGE_STATE_ASLEEP)


async def test_names_that_nothing_has_and_scopes_of_what_has_none_are_refused(fleet: InProcessFleet) -> None:
    for request in (v.PauseGenerationRequest(adapter="maths"), v.ContinueGenerationRequest(adapter="maths")):
        call = fleet.stub.PauseGeneration if isinstance(request, v.PauseGenerationRequest) else None
        error = await refusal((call or fleet.stub.ContinueGeneration)(request))
        assert (error.reason, error.field) == (Reason.ADAPTER_NOT_FOUND, "adapter")
        assert "code, math" in error.message
    header = RequestHeader(fence=common.Fence(update_id="u"))
    error = await refusal(fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header, adapter="math")))
    assert (error.reason, error.field) == (Reason.FIELD_CONFLICT, "adapter")
    for field in ("torch_empty_cache", "when_resident"):
        wrong = v.ContinueGenerationRequest(adapter="math", **{field: True})  # type: ignore[arg-type]
        error = await refusal(fleet.stub.ContinueGeneration(wrong))
        assert (error.reason, error.field) == (Reason.FIELD_CONFLICT, field)
        assert error.message == f"{field} does not apply to the continue of an adapter"
    assert on_record(fleet) == []


async def test_a_continue_of_an_adapter_that_is_not_paused_confirms(fleet: InProcessFleet) -> None:
    await go_on(fleet)
    assert await served_by(fleet, "a", "math")


async def test_the_client_waits_for_the_adapter_and_serves_the_others(fleet: InProcessFleet) -> None:
    async with await aio.connect(fleet.server.address) as client:
        operation = await client.pause_generation("retract", adapter="math")
        assert operation.state == OPERATION_STATE_OK
        prompts = [[1, 2, 3]]
        waiting = asyncio.create_task(_sample(client, prompts, "math"))
        for name in OTHERS:
            await asyncio.wait_for(_sample(client, prompts, name), 10)
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await client.continue_generation(adapter="math")
        await asyncio.wait_for(waiting, 10)


async def _sample(client: aio.AsyncFleet, prompts: list[list[int]], adapter: str) -> None:
    answer = await client.generate(prompts[0], adapter=adapter, max_new_tokens=2)
    assert answer.samples[0].completion_tokens == 2
