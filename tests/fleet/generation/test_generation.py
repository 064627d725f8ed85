"""Generation behind the gate of what a stage may serve, and the SDK that picks the stage."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from http_calls import nested
from updating import restart, update
from waiting import eventually

import rlctl
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.engine import Call
from rlctl.sdk import aio
from rlctl.sdk.aio import AsyncFleet
from rlctl.testing.fake_engine import FAULTS, FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import open_channel
from rlctl.transport.status import from_grpc
from rlctl.v1 import rollout_pb2 as r
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import (
    OUTCOME_DIRTY,
    PAUSE_MODE_ABORT,
    PAUSE_MODE_DRAIN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    STAGE_STATE_READY,
    PauseMode,
)
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub


@pytest.fixture
async def client(fleet: InProcessFleet) -> AsyncIterator[AsyncFleet]:
    async with await aio.connect(fleet.server.address) as client:
        yield client


async def refusal(call: object) -> RlctlError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_grpc(caught.value)


async def test_a_request_is_served_and_stamped(fleet: InProcessFleet) -> None:
    async with open_channel(fleet.stages["b"].rollout_address) as channel:
        stub = RolloutServiceStub(channel)
        request = r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=3))
        whole = await stub.Generate(request)
        assert (whole.slot, whole.incarnation) == ("b", 1)
        assert list(whole.samples[0].output_ids) == [0, 1, 2]
        span = whole.samples[0].versions[0]
        assert (span.version.label, span.start, span.end) == ("initial", 0, 3)
        assert whole.samples[0].finish_reason.type == r.FINISH_TYPE_LENGTH
        parts = [part async for part in stub.GenerateStream(request)]
        assert "".join(part.samples[0].text for part in parts) == whole.samples[0].text
        assert len(parts) == 4


async def test_the_largest_token_id_is_no_defect_of_the_fake_engine(fleet: InProcessFleet) -> None:
    async with open_channel(fleet.stages["b"].rollout_address) as channel:
        prompt, params = r.TokenIds(ids=[2**32 - 1]), r.SamplingParams(max_new_tokens=2)
        whole = await RolloutServiceStub(channel).Generate(r.GenerateRequest(input_ids=prompt, sampling_params=params))
        assert list(whole.samples[0].output_ids) == [0, 1]


async def test_an_answer_without_tokens_names_the_version_that_the_stage_served(fleet: InProcessFleet) -> None:
    await update(fleet, "new")
    async with open_channel(fleet.stages["b"].rollout_address) as channel:
        stub = RolloutServiceStub(channel)
        none = r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=0))
        whole = await stub.Generate(none)
        assert (list(whole.samples[0].output_ids), list(whole.samples[0].versions)) == ([], [])
        assert whole.weight_version == fleet.stages["b"]._serving().version
        assert whole.weight_version.sequence == 2
        two = r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=2))
        parts = [part async for part in stub.GenerateStream(two)]
        assert [part.weight_version.sequence for part in parts] == [2, 0, 0]


async def test_a_stream_names_the_version_again_once_it_has_changed(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.stages["b"]._engine, "_pace", 0.05)
    async with open_channel(fleet.stages["b"].rollout_address) as channel:
        request = r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=30))
        stream = aiter(RolloutServiceStub(channel).GenerateStream(request))
        parts = [await anext(stream)]
        await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=PAUSE_MODE_IN_PLACE))
        await update(fleet, "new")
        await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
        parts += [part async for part in stream]
    assert [part.weight_version.sequence for part in parts if part.HasField("weight_version")] == [1, 2]


async def test_a_sample_without_tokens_has_the_version_under_which_it_was_answered(client: AsyncFleet) -> None:
    (sample,) = await client.rollout("actor").generate([1], max_new_tokens=0)
    assert (sample.output_ids, sample.versions, sample.staleness) == ([], [], None)
    assert sample.last_version is not None
    assert sample.last_version.sequence == 1


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (r.GenerateRequest(), Reason.FIELD_REQUIRED, "prompt"),
        (r.GenerateRequest(text="x", model="zz"), Reason.MODEL_NOT_FOUND, "model"),
        (r.GenerateRequest(text="x", min_version_seq=2), Reason.VERSION_TOO_OLD, "min_version_seq"),
        (r.GenerateRequest(text="x", bootstrap_version_seq=2), Reason.STAGE_NOT_SERVING, "bootstrap_version_seq"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    fleet: InProcessFleet, request_: r.GenerateRequest, reason: Reason, field: str
) -> None:
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        error = await refusal(RolloutServiceStub(channel).Generate(request_))
        assert (error.reason, error.field) == (reason, field)


async def test_a_paused_stage_takes_nothing_new(fleet: InProcessFleet) -> None:
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest())
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        error = await refusal(RolloutServiceStub(channel).Generate(r.GenerateRequest(text="x")))
        assert error.reason is Reason.STAGE_NOT_SERVING
        assert error.metadata == {"state": "PAUSED"}


@pytest.mark.parametrize(
    "spoiling", [v.ReleaseMemoryRequest(), v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS)]
)
async def test_nothing_new_is_taken_while_one_rank_has_lost_its_weights_and_another_has_not_answered(
    fleet: InProcessFleet, spoiling: v.ReleaseMemoryRequest | v.CheckWeightsRequest
) -> None:
    begun, going = asyncio.Event(), asyncio.Event()

    async def late(engine: FakeEngine, name: str, _: Call) -> None:
        if engine.config.rank == 1 and name in ("release_memory", "check_weights"):
            begun.set()
            await going.wait()

    FAULTS[fleet.specs[0].model_path, 1] = late
    spoiling.header.target.slots.append("b")
    verb = type(spoiling).DESCRIPTOR.name.removesuffix("Request")
    async with open_channel(fleet.stages["b"].rollout_address) as channel:
        told = asyncio.ensure_future(getattr(fleet.stub, verb)(spoiling))
        await begun.wait()
        request = r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=1))
        assert verb in (await refusal(RolloutServiceStub(channel).Generate(request))).message
        going.set()
        await told


class Between:
    """Pauses stop every rank of the engine, but it has not said so yet: the stage is READY."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stopped, self.telling = asyncio.Event(), asyncio.Event()
        pause = FakeEngine.pause_generation

        async def pausing(engine: FakeEngine, request: v.PauseGenerationRequest, call: Call) -> None:
            await pause(engine, request, call)
            self.stopped.set()
            await self.telling.wait()

        monkeypatch.setattr(FakeEngine, "pause_generation", pausing)


async def ask_between(fleet: InProcessFleet, pause: Between, stub: Any, **fields: Any) -> Any:
    """A request of two tokens that passes the gate after the engine's pause and before the stage's."""
    await pause.stopped.wait()
    assert fleet.stages["a"]._serving().state == STAGE_STATE_READY
    asked = r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=2), **fields)
    call = stub.GenerateStream(asked)
    await eventually(lambda: fleet.stages["a"]._engine._running)
    return call


MODES = [PAUSE_MODE_ABORT, PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE, PAUSE_MODE_DRAIN]


@pytest.mark.parametrize("mode", MODES)
async def test_what_comes_between_an_engines_pause_and_its_stages_is_generated_by_the_new_weights(
    make_fleet: Callable, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, mode: PauseMode.ValueType
) -> None:
    pause = Between(monkeypatch)
    async with make_fleet(a=1) as fleet, open_channel(fleet.stages["a"].rollout_address) as channel:
        options = v.UpdateOptions(pause=mode)
        update = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), weight_version="two", options=options)
        updating = asyncio.ensure_future(fleet.stub.UpdateWeightsFromDisk(update))
        call = await ask_between(fleet, pause, RolloutServiceStub(channel))
        pause.telling.set()
        parts = [part async for part in call]
        assert [span.version.label for part in parts for span in part.samples[0].versions] == ["two", "two"]
        assert parts[-1].samples[0].finish_reason.type == r.FINISH_TYPE_LENGTH
        assert (await updating).state == OPERATION_STATE_OK


async def test_what_comes_between_an_engines_pause_and_its_stages_ends_with_weights_that_nobody_vouches_for(
    make_fleet: Callable, checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = Between(monkeypatch)

    async def broken(_: FakeEngine, name: str, __: Call) -> None:
        if name == "update_weights_from_disk":
            raise Reason.ENGINE_FAILED.error("half of it", outcome=OUTCOME_DIRTY)

    async with make_fleet(a=1) as fleet, open_channel(fleet.stages["a"].rollout_address) as channel:
        FAULTS[fleet.specs[0].model_path, 0] = broken
        options = v.UpdateOptions(pause=PAUSE_MODE_RETRACT)
        update = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), weight_version="two", options=options)
        updating = asyncio.ensure_future(fleet.stub.UpdateWeightsFromDisk(update))
        call = await ask_between(fleet, pause, RolloutServiceStub(channel))
        pause.telling.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            assert not [part async for part in call]
        assert from_grpc(caught.value).reason is Reason.STAGE_NOT_SERVING
        assert (await updating).state == OPERATION_STATE_FAILED
        await eventually(lambda: not fleet.stages["a"]._engine._running)


@pytest.mark.parametrize("mode", MODES)
async def test_what_comes_between_an_engines_pause_and_its_stages_waits_as_long_as_its_caller(
    make_fleet: Callable, monkeypatch: pytest.MonkeyPatch, mode: PauseMode.ValueType
) -> None:
    pause = Between(monkeypatch)
    async with make_fleet(a=1) as fleet, open_channel(fleet.stages["a"].rollout_address) as channel:
        stub = RolloutServiceStub(channel)
        pausing = asyncio.ensure_future(fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=mode)))
        patient, other = [await ask_between(fleet, pause, stub, rid=rid) for rid in ("patient", "other")]
        await eventually(lambda: len(fleet.stages["a"]._engine._running) == 2)
        pause.telling.set()
        await pausing
        await stub.Abort(r.AbortRequest(rids=["other"]))
        assert [part.samples[0].finish_reason.type async for part in other] == [r.FINISH_TYPE_ABORT]
        await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
        parts = [part async for part in patient]
        assert [len(part.samples[0].output_ids) for part in parts] == [1, 1, 0]


async def test_a_request_ends_at_its_deadline_and_is_gone_from_the_engine(fleet: InProcessFleet) -> None:
    engine = fleet.stages["a"]._engine
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        request = r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=10**6))
        error = await refusal(RolloutServiceStub(channel).Generate(request, timeout=0.2))
        assert error.reason is Reason.DEADLINE_EXCEEDED
    await eventually(lambda: not engine._running)


async def test_without_a_coordinator_a_stage_serves_only_as_long_as_its_lease(make_fleet: Callable) -> None:
    async with make_fleet(a=1, lease_s=0.5) as fleet, open_channel(fleet.stages["a"].rollout_address) as channel:
        stub = RolloutServiceStub(channel)
        request = r.GenerateRequest(text="x", sampling_params=r.SamplingParams(max_new_tokens=10**6))
        stream = stub.GenerateStream(request)
        parts = aiter(stream)
        await anext(parts)
        await fleet.server._server.stop(0)
        await fleet.server.coordinator.stop()
        async with asyncio.timeout(10):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in parts:
                    pass
        error = from_grpc(caught.value)
        assert error.reason is Reason.STAGE_NOT_SERVING
        assert "lease" in error.message
        assert (await refusal(stub.Generate(request))).reason is Reason.STAGE_NOT_SERVING
        assert not fleet.stages["a"]._engine._running


async def test_requests_are_ended_by_id_and_all(fleet: InProcessFleet) -> None:
    async with open_channel(fleet.stages["a"].rollout_address) as channel:
        stub = RolloutServiceStub(channel)
        request = r.GenerateRequest(rid="mine", text="x", sampling_params=r.SamplingParams(max_new_tokens=10**6))
        generating = asyncio.ensure_future(stub.Generate(request))
        await eventually(lambda: "mine" in fleet.stages["a"]._engine._running)
        answer = await stub.Abort(r.AbortRequest(rids=["mine", "nobody's", "mine", "nobody's"]))
        assert (answer.aborted, list(answer.unknown_rids)) == (1, ["nobody's"])
        assert (await generating).samples[0].finish_reason.type == r.FINISH_TYPE_ABORT
        assert (await refusal(stub.Abort(r.AbortRequest()))).field == "rids"


async def test_the_sdk_goes_round_the_routable_stages(client: AsyncFleet, fleet: InProcessFleet) -> None:
    responses = await client.generate_batch(["x"] * 10, max_new_tokens=1)
    assert Counter(response.slot for response in responses) == {"a": 5, "b": 5}
    await client.pause_generation(slots=["a"])
    responses = await client.generate_batch(["x"] * 4, max_new_tokens=1)
    assert Counter(response.slot for response in responses) == {"b": 4}


async def test_the_sdk_waits_for_a_stage_and_says_when_none_came(client: AsyncFleet) -> None:
    await client.pause_generation()
    with pytest.raises(RlctlError) as caught:
        await client.generate("x", timeout_s=0.3)
    assert caught.value.reason is Reason.NO_ROUTABLE_STAGE
    assert "within 0.3 s: a PAUSED, b PAUSED" in caught.value.message
    waiting = asyncio.ensure_future(client.generate("x", max_new_tokens=1, timeout_s=10))
    await asyncio.sleep(0)
    await client.continue_generation()
    assert (await waiting).samples[0].text


async def test_the_sdk_refuses_a_model_that_nobody_serves_at_once(client: AsyncFleet, fleet: InProcessFleet) -> None:
    async with asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(RlctlError) as caught:
                await client.generate("x", model="nope", timeout_s=60)
            assert caught.value.reason is Reason.MODEL_NOT_FOUND
        await client.pause_generation()
        waiting = asyncio.ensure_future(client.generate("x", model="actor", max_new_tokens=1, timeout_s=60))
        await client.continue_generation()
        assert (await waiting).samples[0].text


async def test_the_sdk_refuses_a_slot_that_nobody_fills_at_once(client: AsyncFleet) -> None:
    async with asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(RlctlError, match="no stage fills slot 'c'; there are: a, b") as caught:
                await client.generate("x", slot="c", timeout_s=60)
            assert (caught.value.reason, caught.value.field) == (Reason.STAGE_NOT_FOUND, "slot")
            with pytest.raises(RlctlError, match="no stage fills slot 'c'"):
                _ = [part async for part in client.generate_stream("x", slot="c", timeout_s=60)]
        assert (await client.generate("x", slot="b", max_new_tokens=1)).slot == "b"


async def test_the_sdk_streams(client: AsyncFleet) -> None:
    texts = [part.samples[0].text async for part in client.generate_stream("x", max_new_tokens=3)]
    assert texts == ["0 ", "1 ", "2 ", ""]


async def test_the_sdk_raises_operations_that_did_not_end_ok_and_carries_them(client: AsyncFleet) -> None:
    with pytest.raises(OperationFailed) as caught:
        await client.update_weights_from_disk("/nowhere")
    assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND
    assert len(caught.value.operation.stage_results) == 2
    unchecked = await client.update_weights_from_disk("/nowhere", check=False)
    assert unchecked.error.reason == "CHECKPOINT_NOT_FOUND"


async def test_a_batch_that_fails_leaves_nothing_running(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = client.generate

    def running() -> bool:
        return any(stage._engine._running for stage in fleet.stages.values())  # type: ignore[attr-defined]

    async def second(prompt: str, **asking: Any) -> Any:
        if prompt == "y":
            await eventually(running)
        return await generate([-1] if prompt == "y" else prompt, **asking)

    monkeypatch.setattr(client, "generate", second)
    with pytest.raises(RlctlError) as caught:
        await client.generate_batch(["x", "y"], max_new_tokens=10**6)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "input_ids")
    await eventually(lambda: not running())


async def test_the_sdk_refuses_parameters_that_do_not_exist(client: AsyncFleet) -> None:
    with pytest.raises(RlctlError, match="no sampling parameter 'temprature'") as caught:
        await client.generate("x", temprature=1.0)
    assert caught.value.field == "sampling_params.temprature"
    with pytest.raises(RlctlError, match="nested deeper than") as caught:
        await client.generate("x", engine_fields={"fine": 1, "deep": nested(30)})
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "engine_fields.deep")
    for field, given in (
        ("min_version_seq", {"min_version_seq": -1}),
        ("top_logprobs_num", {"top_logprobs_num": -1}),
        ("sampling_params.temperature", {"temperature": "hot"}),
        ("sampling_params.max_new_tokens", {"max_new_tokens": -1}),
    ):
        with pytest.raises(RlctlError) as caught:
            await client.generate("x", **given)  # type: ignore[arg-type]
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, field)
    with pytest.raises(RlctlError, match="must be one of abort, retract, in_place, drain"):
        await client.pause_generation("stop")


async def test_one_text_is_not_taken_for_a_list_of_its_characters(
    client: AsyncFleet, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    generate = FakeEngine.generate

    async def listening(engine: FakeEngine, request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        asked.append(list(request.sampling_params.stop))
        async for part in generate(engine, request):
            yield part

    monkeypatch.setattr(FakeEngine, "generate", listening)
    engine = await client.engine("a")
    await client.generate("x", stop="END", max_new_tokens=1)
    await client.rollout("actor").generate("x", stop="END", max_new_tokens=1)
    await engine.generate("x", {"stop": "END", "max_new_tokens": 1})
    await client.generate("x", stop=None, max_new_tokens=1)  # type: ignore[arg-type]
    assert asked == [["END"]] * 3 + [[]]
    generating = asyncio.create_task(client.generate("x", rid="mine", max_new_tokens=10**6))
    await eventually(lambda: any("mine" in stage._engine._running for stage in fleet.stages.values()))
    await client.abort_requests("mine")
    assert (await asyncio.wait_for(generating, 5)).samples[0].finish_reason.type == r.FINISH_TYPE_ABORT
    with pytest.raises(RlctlError, match="no stage fills slot 'none'"):
        await client.flush_cache(slots="none")
    with pytest.raises(RlctlError, match="no stage fills slot 'none'"):
        await client.set_enabled("none", True)
    for call in (client.generate_batch("12"), client.rollout("actor").generate_batch("12")):
        with pytest.raises(RlctlError) as caught:
            await call  # type: ignore[misc]
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "prompts")


async def test_a_batch_takes_what_can_be_gone_through_once_and_no_seed(client: AsyncFleet) -> None:
    responses = await client.generate_batch((prompt for prompt in ("x", "y")), seed=None, max_new_tokens=1)
    assert len(responses) == 2


async def test_connecting_to_nobody_fails_in_time() -> None:
    with pytest.raises(RlctlError) as caught:
        await aio.connect("127.0.0.1:1", timeout_s=0.5)
    assert caught.value.reason is Reason.UNREACHABLE
    assert "rlctl up" in str(caught.value)


@pytest.mark.parametrize("address", ["http://127.0.0.1:5080", "127.0.0.1", "127.0.0.1:http"])
async def test_connecting_to_what_is_no_address_fails_at_once(address: str) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(RlctlError, match="is not host:port") as caught:
            await aio.connect(address, timeout_s=60)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "address")


async def test_no_line_is_kept_to_where_a_stage_no_longer_is(make_fleet: Callable) -> None:
    async with make_fleet(a=1) as fleet, await aio.connect(fleet.server.address) as client:
        for _ in range(2):
            await client.generate("x", max_new_tokens=1)
            here = fleet.stages["a"].rollout_address
            await restart(fleet, "a")
        await client.generate("x", max_new_tokens=1)
        assert fleet.stages["a"].rollout_address != here
        assert set(client._lines._lines) == {fleet.stages["a"].rollout_address}


async def test_a_line_that_is_used_is_kept_wherever_its_stage_has_gone(client: AsyncFleet) -> None:
    lines = client._lines
    left, _used = (lines.take(f"127.0.0.1:{number}") for number in (1, 2))
    left.users -= 1
    lines.take("127.0.0.1:3")
    assert set(lines._lines) == {"127.0.0.1:2", "127.0.0.1:3"}


async def test_a_fleet_may_be_closed_while_a_stream_is_open(
    fleet: InProcessFleet, caplog: pytest.LogCaptureFixture
) -> None:
    def left_open() -> None:
        with rlctl.connect(fleet.server.address) as blocking:
            stream = blocking.generate_stream("x", max_new_tokens=400)
            next(stream)
            blocking.close()
            stream.close()
            assert list(stream) == []
            with pytest.raises(RlctlError, match="closed") as caught:
                blocking.status()
            assert caught.value.reason is Reason.CANCELLED

    await asyncio.to_thread(left_open)
    assert not [record for record in caplog.records if record.name == "asyncio"]
