"""POST /generate over a fleet of fake engines, whose tokens are numbers that go on from the last one of the prompt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from http_calls import events, nested, post
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.sampling import MOST_LEVELS, MOST_SAMPLES
from rlctl.gateway.http.call import UNKNOWN_FIELDS
from rlctl.rollout import continuation
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import MAX_MESSAGE_BYTES
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as r
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_OK

LONG = 400
TOKEN = "a token made for this test"


def running(fleet: InProcessFleet) -> dict[str, int]:
    return {slot: len(stage._engine._running) for slot, stage in fleet.stages.items()}  # type: ignore[attr-defined]


async def begun(fleet: InProcessFleet, count: int = 1) -> None:
    await eventually(lambda: sum(running(fleet).values()) >= count)


async def idle(fleet: InProcessFleet) -> None:
    await eventually(lambda: not sum(running(fleet).values()))


async def new_weights(fleet: InProcessFleet, path: str, pause: common.PauseMode.ValueType) -> None:
    options = v.UpdateOptions(pause=pause)
    operation = await fleet.stub.UpdateWeightsFromDisk(v.UpdateWeightsFromDiskRequest(model_path=path, options=options))
    assert operation.state == OPERATION_STATE_OK, operation.error


async def test_a_reply_is_sglangs(http: aiohttp.ClientSession) -> None:
    body = {"input_ids": [7], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True, "rid": "mine"}
    status, reply = await post(http, body)
    assert status == 200
    assert (reply["text"], reply["output_ids"]) == ("8 9 10 ", [8, 9, 10])
    meta = reply["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["output_token_logprobs"] == [[-1.0, token, None] for token in (8, 9, 10)]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (1, 3)
    assert (meta["weight_version"], meta["weight_version_seq"]) == ("initial", 1)
    assert meta["weight_versions"] == [{"version": "initial", "start": 0, "end": 3, "seq": 1}]


async def test_batches_and_groups_come_in_order(http: aiohttp.ClientSession) -> None:
    body = {"input_ids": [[7], [70]], "sampling_params": {"max_new_tokens": 2, "n": 2}, "rid": ["x", "y"]}
    status, replies = await post(http, body)
    assert status == 200
    assert [reply["output_ids"] for reply in replies] == [[8, 9], [8, 9], [71, 72], [71, 72]]
    assert [reply["meta_info"]["id"] for reply in replies] == ["x_0", "x_1", "y_0", "y_1"]
    status, reply = await post(http, {"text": ["a"], "sampling_params": [{"max_new_tokens": 1}]})
    assert (status, len(reply)) == (200, 1)


async def test_the_largest_seed_has_one_after_it(http: aiohttp.ClientSession) -> None:
    status, reply = await post(http, {"text": "x", "sampling_params": {"n": 2, "sampling_seed": 2**64 - 1}})
    assert status == 200, reply


async def test_a_stream_has_all_so_far_in_each_event(http: aiohttp.ClientSession) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 20}, "stream": True, "return_logprob": True}
    async with http.post("/generate", json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        told = events(await response.text())
    assert told[-1]["output_ids"] == list(range(20))
    assert told[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    assert {event["meta_info"]["prompt_tokens"] for event in told} == {1}
    for before, after in itertools.pairwise(told):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert len(after["meta_info"]["output_token_logprobs"]) == len(after["output_ids"])
        assert before["meta_info"]["finish_reason"] is None
    body = {"input_ids": [[1], [10]], "sampling_params": {"max_new_tokens": 5}, "stream": True}
    async with http.post("/generate", json=body) as response:
        told = events(await response.text())
    last = {event["index"]: event["output_ids"] for event in told if event["meta_info"]["finish_reason"]}
    assert last == {0: [2, 3, 4, 5, 6], 1: [11, 12, 13, 14, 15]}


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "text"),
        ({"text": "x", "input_ids": [1]}, 400, "input_ids"),
        ({"text": 1}, 400, "text"),
        ({"input_ids": ["x"]}, 400, "input_ids"),
        ({"text": "x", "model": "actr"}, 404, "model"),
        ({"text": "x", "sampling_params": {"temperature": "hot"}}, 400, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"n": 0}}, 400, "sampling_params.n"),
        ({"text": "x", "image_data": "x"}, 400, "image_data"),
        ({"text": "x", "stream": "maybe"}, 400, "stream"),
        ({"text": ["x", "y"], "rid": ["one"]}, 400, "rid"),
        ({"text": "x", "session_id": 5}, 400, "session_id"),
        ({"text": "x", "lora_path": "none"}, 404, "adapter"),
        ({"text": "x", "sampling_params": {"custom_params": nested(31)}}, 400, "sampling_params.custom_params"),
        ({"text": "x", "token_ids_logprob": nested(300)}, 400, "token_ids_logprob"),
        ({"text": "x", "sampling_params": {"n": MOST_SAMPLES + 1}}, 400, "sampling_params.n"),
        ({"text": ["x"] * 5, "sampling_params": {"n": 2000}}, 400, "sampling_params.n"),
        ({"text": ["x"] * 10_000}, 400, "text"),
        ([], 400, "body"),
    ],
)
async def test_bad_input_names_its_field(
    http: aiohttp.ClientSession, fleet: InProcessFleet, body: Any, status: int, field: str
) -> None:
    got, reply = await post(http, body)
    assert (got, reply["error"]["field"]) == (status, field), reply
    if isinstance(body, dict):
        got, reply = await post(http, {"stream": True, **body})
        assert (got, reply["error"]["field"]) == (status, field), "also before a stream has begun"
    assert not sum(running(fleet).values())


async def test_what_is_nested_as_deep_as_it_may_be_comes_back(http: aiohttp.ClientSession) -> None:
    deep = nested(MOST_LEVELS - 2)
    status, reply = await post(http, {"text": "x", "sampling_params": {"max_new_tokens": 1, "custom_params": deep}})
    assert status == 200, reply
    assert reply["meta_info"]["fields"] == {"sampling_params": {"custom_params": deep}}


async def test_a_defect_ends_a_stream(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_gateway(fleet) as (server, http):

        async def broken(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(server.generation, "complete", broken)
        async with asyncio.timeout(5):
            status, reply = await post(http, {"text": "x", "stream": True})
        assert (status, reply["error"]["reason"]) == (500, "INTERNAL")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_tokens_names_the_version_under_which_it_was_given(
    http: aiohttp.ClientSession, stream: bool
) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 0}, "stream": stream}
    async with http.post("/generate", json=body) as response:
        told = events(await response.text())[-1] if stream else await response.json()
    meta = told["meta_info"]
    assert (meta["completion_tokens"], meta["weight_version"], meta["weight_version_seq"]) == (0, "initial", 1)
    assert "weight_versions" not in meta


async def test_a_request_that_an_abort_ended_before_its_first_token_names_its_version(
    http: aiohttp.ClientSession, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in fleet.stages.values():
        monkeypatch.setattr(stage._engine, "_paused", common.PAUSE_MODE_IN_PLACE)
    asked = asyncio.create_task(post(http, {"rid": "r", "text": "x", "sampling_params": {"max_new_tokens": 9}}))
    await begun(fleet, 1)
    async with http.post("/abort_request", json={"rid": "r"}) as response:
        assert response.status == 200
    _, reply = await asked
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert (reply["output_ids"], reply["meta_info"]["weight_version"]) == ([], "initial")


async def test_numbers_of_an_engines_own_that_json_has_not_are_null(
    http: aiohttp.ClientSession, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def infinite(request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        told = r.GenerateResponse(samples=[r.Sample(finish_reason=r.FinishReason(type=r.FINISH_TYPE_LENGTH))])
        told.samples[0].engine_meta.update({"own": {"all": [1, float("-inf"), {"x": float("nan")}, None, "y"]}})
        yield told

    for stage in fleet.stages.values():
        monkeypatch.setattr(stage._engine, "generate", infinite)
    status, reply = await post(http, {"text": "x"})
    assert (status, reply["meta_info"]["own"]) == (200, {"all": [1, None, {"x": None}, None, "y"]})


async def test_an_answer_that_cannot_be_sent_fails_alone(
    http: aiohttp.ClientSession, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unsendable(request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        tried.append(request)
        told = r.GenerateResponse(samples=[r.Sample(finish_reason=r.FinishReason(type=r.FINISH_TYPE_LENGTH))])
        if request.text == "large":
            told.samples[0].text = "x" * MAX_MESSAGE_BYTES
        else:
            told.samples[0].engine_meta.update(nested(31))
        yield told

    def also(generate: Any) -> Any:
        return lambda request: unsendable(request) if request.text else generate(request)

    tried: list[r.GenerateRequest] = []
    for stage in fleet.stages.values():
        monkeypatch.setattr(stage._engine, "generate", also(stage._engine.generate))
    long = {"input_ids": [1], "sampling_params": {"max_new_tokens": 100_000}}
    others = [asyncio.create_task(post(http, long)) for _ in range(4)]
    await begun(fleet, 4)
    status, reply = await post(http, {"text": "large"})
    assert (status, reply["error"]["reason"]) == (413, "MESSAGE_TOO_LARGE")
    status, reply = await post(http, {"text": "deep"})
    assert (status, reply["error"]["field"]) == (500, "engine_meta")
    assert len(tried) == 2, "nobody else is asked"
    assert sum(running(fleet).values()) == 4
    for other in others:
        other.cancel()
    await idle(fleet)


async def test_what_sglang_ignores_is_ignored_and_told(http: aiohttp.ClientSession) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1, "tempreature": 0}, "retrun_logprob": True}
    async with http.post("/generate", json=body) as response:
        assert response.status == 200
        assert response.headers[UNKNOWN_FIELDS] == "retrun_logprob, sampling_params.tempreature"


async def test_a_caller_that_leaves_ends_its_requests_at_the_engine(
    http: aiohttp.ClientSession, fleet: InProcessFleet
) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 100_000, "n": 4}}
    whole = asyncio.create_task(post(http, body))
    await begun(fleet, 4)
    whole.cancel()
    await idle(fleet)
    response = await http.post("/generate", json={**body, "stream": True})
    await response.content.readany()
    await begun(fleet, 4)
    response.close()
    await idle(fleet)


async def test_a_session_stays_at_one_engine_however_it_is_named(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []
    for slot, stage in fleet.stages.items():
        engine: Any = stage._engine
        generate = engine.generate

        def noted(request: Any, slot: str = slot, generate: Any = generate) -> AsyncIterator[Any]:
            served.append(slot)
            return generate(request)  # type: ignore[no-any-return]

        monkeypatch.setattr(engine, "generate", noted)
    one: dict[str, Any] = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    async with make_gateway(fleet) as (_, http):
        for number in range(8):
            name = f"session-{number}"
            served.clear()
            for body, headers in (
                ({**one, "session_id": name}, {}),
                ({**one, "routing_key": name}, {}),
                (one, {"X-Session-ID": name}),
                (one, {"X-SMG-Routing-Key": name}),
                ({**one, "session_id": name}, {"X-Session-ID": "another"}),
            ):
                assert (await post(http, body, **headers))[0] == 200
            assert len(set(served)) == 1, served


async def test_a_pause_gives_back_what_there_is_and_later_requests_wait(
    http: aiohttp.ClientSession, fleet: InProcessFleet
) -> None:
    long = asyncio.create_task(post(http, {"text": "x", "sampling_params": {"max_new_tokens": 100_000}}))
    await begun(fleet)
    await asyncio.sleep(0.05)
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_ABORT))
    status, reply = await long
    assert status == 200
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) < 100_000
    waiting = asyncio.create_task(post(http, {"text": "x", "sampling_params": {"max_new_tokens": 2}}))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert (await waiting)[0] == 200


async def test_a_wait_that_is_too_long_says_when_to_come_again(
    fleet: InProcessFleet, make_gateway: Callable[..., Any]
) -> None:
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_ABORT))
    async with make_gateway(fleet, timeout_s=0.3) as (_, http):
        async with http.post("/generate", json={"text": "x"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            error = (await response.json())["error"]
            assert error["reason"] == "NO_ROUTABLE_STAGE"
            assert "PAUSED" in error["message"]
        assert sum(running(fleet).values()) == 0
    async with make_gateway(fleet, max_inflight=1, timeout_s=5) as (_, http):
        first = asyncio.create_task(post(http, {"text": "x", "sampling_params": {"max_new_tokens": 1}}))
        await asyncio.sleep(0.2)
        async with http.post("/generate", json={"text": "x"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["reason"] == "TOO_MANY_REQUESTS"
        await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
        assert (await first)[0] == 200


async def test_updates_under_load_fail_no_request_and_no_token_is_stale(
    http: aiohttp.ClientSession, fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    stop = asyncio.Event()
    seen: list[tuple[int, int]] = []

    async def ask() -> None:
        while not stop.is_set():
            before = fleet.server.coordinator.roster.fleet().models[0].latest.sequence
            status, reply = await post(http, {"text": "x", "sampling_params": {"max_new_tokens": 20}})
            assert status == 200, reply
            assert reply["meta_info"]["finish_reason"]["type"] == "length"
            seen.append((before, min(span["seq"] for span in reply["meta_info"]["weight_versions"])))

    asking = [asyncio.create_task(ask()) for _ in range(8)]
    for number in range(10):
        await new_weights(fleet, checkpoint(f"w{number}"), common.PAUSE_MODE_RETRACT)
        await asyncio.sleep(0.03)
    stop.set()
    await asyncio.gather(*asking)
    assert len(seen) > 20
    assert {first for _, first in seen} > {1, 5}, "at many versions"
    assert all(first >= before for before, first in seen), "never older than what was published when it was asked"


async def test_a_stage_that_dies_costs_no_token(http: aiohttp.ClientSession, fleet: InProcessFleet) -> None:
    body = {"input_ids": [100], "sampling_params": {"max_new_tokens": LONG}, "return_logprob": True, "stream": True}
    response = await http.post("/generate", json=body)
    await begun(fleet)
    await asyncio.sleep(0.05)
    (slot,) = [slot for slot, count in running(fleet).items() if count]
    await fleet.stages[slot].stop()
    told = events(await response.text())
    assert told[-1]["output_ids"] == list(range(101, 101 + LONG))
    assert told[-1]["meta_info"]["completion_tokens"] == LONG
    assert len(told[-1]["meta_info"]["output_token_logprobs"]) == LONG
    del fleet.stages[slot]


async def test_a_least_version_is_waited_for(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], checkpoint: Callable[[str], str]
) -> None:
    one = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    header = {"X-RLCTL-Min-Version": "2"}
    async with make_gateway(fleet, timeout_s=0.3) as (_, http):
        status, reply = await post(http, one, **header)
        assert (status, reply["error"]["reason"]) == (503, "NO_ROUTABLE_STAGE")
        assert (await post(http, one, **{"X-RLCTL-Min-Version": "x"}))[0] == 400
        await new_weights(fleet, checkpoint("two"), common.PAUSE_MODE_RETRACT)
        status, reply = await post(http, one, **header)
        assert (status, reply["meta_info"]["weight_version_seq"]) == (200, 2)


@pytest.mark.parametrize(("token", "reason"), [("", Reason.TOKEN_MISSING), ("another", Reason.TOKEN_INVALID)])
async def test_one_that_may_not_watch_the_fleet_does_not_start(
    make_fleet: Callable[..., Any], make_gateway: Callable[..., Any], token: str, reason: Reason
) -> None:
    async with make_fleet(token=TOKEN, a=1) as fleet:
        with pytest.raises(RlctlError) as caught:
            async with make_gateway(fleet, token=token):
                pass
        assert caught.value.reason is reason


async def test_the_callers_token_decides_and_not_the_gateways(
    make_fleet: Callable[..., Any], make_gateway: Callable[..., Any]
) -> None:
    one = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    async with make_fleet(token=TOKEN, a=1) as fleet, make_gateway(fleet) as (_, http):
        async with http.post("/generate", json=one) as response:
            assert response.status == 401, await response.text()
            assert response.headers["WWW-Authenticate"] == "Bearer"
        status, reply = await post(http, one, Authorization="Bearer wrong")
        assert status == 401, reply
        assert (await post(http, one, Authorization="Basic x"))[0] == 401
        assert (await post(http, one, Authorization=f"Bearer {TOKEN}"))[0] == 200
        async with http.get("/v1/models") as response:
            assert response.status == 401, await response.text()
        async with http.get("/v1/models", headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            (card,) = (await response.json())["data"]
            assert (card["id"], card["weight_version_seq"]) == ("actor", 1)


async def test_a_short_body_that_asks_for_much_is_refused_before_anything_is_made_of_it(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MiB held all callers up for a quarter of a minute; others took all memory that there was."""

    def made(*_: Any, **__: Any) -> Any:
        raise AssertionError("a sample was made")

    monkeypatch.setattr(continuation, "begin", made)
    many, large, stops = [[1]] * 10_000, [70_000] * 50_000, ["x" * 100] * 1000
    async with make_gateway(fleet, dialect="vllm") as (_, http):
        for path, body, status, field in (
            ("/generate", {"input_ids": many, "rid": 5}, 400, "input_ids"),
            ("/v1/completions", {"prompt": [*many, {}]}, 400, "prompt"),
            ("/generate", {"input_ids": large, "sampling_params": {"n": 4096}}, 413, "body"),
            ("/v1/completions", {"prompt": large, "n": 4096}, 413, "body"),
            ("/inference/v1/generate", {"token_ids": large, "sampling_params": {"n": 4096}}, 413, "body"),
            ("/generate", {"input_ids": [[1]] * 4000, "sampling_params": {"stop": stops}}, 413, "body"),
            ("/v1/completions", {"prompt": [[1]] * 4000, "stop": stops}, 413, "body"),
            ("/generate", {"text": "x", "session_id": "x" * 10_000}, 400, "session_id"),
        ):
            got, reply = await post(http, body, path)
            assert (got, reply["error"]["field"]) == (status, field), (path, str(reply)[:300])
