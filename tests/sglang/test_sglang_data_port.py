"""The data port in front of a real SGLang server: its answers, its closed doors and its gate."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from passing_suite import (
    LABEL,
    OWN,
    Gate,
    clients_bodies,
    compare,
    open_gate,
    passed_on,
    peaked,
    port,
    post,
    until,
)
from rlctl_sglang.requests import passing
from server_stage import Driver

from rlctl.demo.tiny import encode
from rlctl.runtime.http_errors import REASON
from rlctl.v1.common_pb2 import STAGE_STATE_DIRTY, STAGE_STATE_PAUSED, STAGE_STATE_READY
from rlctl.v1.rollout_pb2 import AbortRequest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

GREEDY = {"temperature": 0.0, "max_new_tokens": 6}
CHAT = [{"role": "user", "content": "1 2 3"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"name": "number", "schema": {"type": "integer"}}


@pytest.fixture
def gate(driver: Driver) -> Gate:
    return open_gate(driver)


@pytest.fixture
async def url(driver: Driver, gate: Gate) -> AsyncIterator[str]:
    async with port(driver, gate, passing.routes(metrics=False)) as url:
        yield url


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def key(driver: Driver) -> str:
    return driver.engine._server.http._keys[False]


def bodies() -> list[tuple[str, Any]]:
    """What clients of SGLang send: natively, completions, chats; right and wrong."""
    ids = encode("12+34")
    native: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"text": "12+34"},
        {"input_ids": [ids, encode("7")]},
        {"text": ["1", "2+2"]},
        {"input_ids": ids, "rid": "mine"},
        {"input_ids": [ids, ids], "rid": ["one", "two"]},
        {"input_ids": ids, "no_such_field": {"a": [1]}},
        {"text": "12", "input_ids": ids},
        {},
        {"input_ids": []},
        {"input_ids": ids * 400},
        {"input_ids": ids, "return_hidden_states": True},
        {"input_ids": ids, "lora_path": None},
    ]
    sampling: list[dict[str, Any]] = [
        {},
        {"max_new_tokens": 1},
        {"stop": ["3"]},
        {"stop_token_ids": [5], "n": 2},
        {"regex": "[0-9]+"},
        {"json_schema": json.dumps({"type": "integer"})},
        {"logit_bias": {"3": 5.0}},
        {"ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
        {"top_k": 1, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
        {"max_new_tokens": -1},
        {"top_p": 7},
        {"no_such_parameter": 1},
        {"min_new_tokens": 2, "no_stop_trim": True},
    ]
    options: list[dict[str, Any]] = [
        {},
        {"stream": True},
        {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
        {"return_logprob": True, "return_text_in_logprobs": True, "stream": True},
        {"return_prompt_token_ids": True, "cache_salt": "salt", "priority": 1},
    ]
    made: list[tuple[str, Any]] = [
        ("/generate", {**prompt, **option, "sampling_params": GREEDY})
        for prompt, option in itertools.product(native, options)
    ]
    made += [
        ("/generate", {"input_ids": ids, **option, "sampling_params": {**GREEDY, **each}})
        for each, option in itertools.product(sampling, options)
    ]
    openai: list[dict[str, Any]] = [
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"n": 2},
        {"stop": "3"},
        {"logprobs": 1},
        {"seed": 3, "user": "somebody", "metadata": {"a": "b"}},
        {"echo": True},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"3": 5}},
        {"max_tokens": 0},
        {"temperature": -1},
        {"model": "any"},
        {"no_such_field": 1},
    ]
    made += [
        ("/v1/completions", {"model": "actor", "prompt": prompt, "max_tokens": 5, "temperature": 0, **each})
        for prompt, each in itertools.product(["12+34", ids, ["1", "2"], [ids, encode("8")]], openai)
    ]
    made += [
        ("/v1/completions", {"prompt": prompt, "max_tokens": 5, "temperature": 0, "stream": True, **each})
        for prompt, each in itertools.product(["12+34", ids], openai)
        if "stream" not in each
    ]
    chat: list[dict[str, Any]] = [
        *(each for each in openai if "echo" not in each and "logprobs" not in each),
        {"logprobs": True, "top_logprobs": 2},
        *({"tools": TOOLS, **each} for each in ({}, {"stream": True}, {"tool_choice": "none"}, {"tool_choice": NAMED})),
        *({**each, "stream": True} for each in ({"n": 2}, {"stop": "3"}, {"logprobs": True}, {"max_tokens": 0})),
        *(
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}, **each}
            for each in ({}, {"stream": True})
        ),
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "1"}]}]},
    ]
    made += [
        ("/v1/chat/completions", {"model": "actor", "messages": CHAT, "max_tokens": 5, "temperature": 0, **each})
        for each in chat
    ]
    made += [
        ("/tokenize", {"prompt": "1 2 3", "model": "actor"}),
        ("/detokenize", {"tokens": ids, "model": "actor"}),
        ("/v1/models", None),
        ("/v1/models/any", None),
        ("/v1/messages", {"model": "actor", "messages": CHAT, "max_tokens": 5, "temperature": 0}),
        ("/v1/messages/count_tokens", {"model": "actor", "messages": CHAT}),
        ("/classify", {"text": "1"}),
        ("/encode", {"text": "1"}),
        ("/v1/embeddings", {"model": "actor", "input": "1"}),
        ("/v1/score", {"model": "actor", "query": "1", "items": ["2", "3"], "label_token_ids": [1, 2]}),
        ("/v1/rerank", {"model": "actor", "query": "1", "documents": ["2"]}),
        ("/generate", b"[1, 2]"),
    ]
    return made


@pytest.mark.timeout(800)
async def test_answers_are_those_of_the_server(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    """Through stage and gateway, and at the data port alone where the gateway has answers of its own."""
    checkpoint = peaked(tiny, tmp_path / "peaked")
    requests = bodies() + clients_bodies("sglang", checkpoint)
    reads = [request for request in requests if request[1] is None]
    posts = [request for request in requests if request[1] is not None]
    assert len(posts) > 260
    async with passed_on("sglang", checkpoint, tmp_path) as passed:
        http = passed.engine._server.http

        def renamed(body: Any) -> tuple[Any, dict[bytes, bytes]]:
            return body, {passed.label.encode(): LABEL.encode()}

        differing = [
            *await compare(http.url, passed.port, reads, http._keys[False], renamed=renamed),
            *await compare(http.url, passed.gateway, posts, http._keys[False], renamed=renamed),
        ]
    assert not differing, "\n".join(differing)


async def test_the_answer_says_slot_and_version(url: str, gate: Gate, session: aiohttp.ClientSession) -> None:
    body = {"input_ids": encode("1"), "sampling_params": GREEDY}
    answer = await post(session, f"{url}/generate", body)
    assert [answer.headers[name] for name in OWN] == ["actor-0", gate.serving.version.label, "1"]
    assert json.loads(answer.body)["meta_info"]["weight_version"] == gate.serving.version.label


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", {"input_ids": [1, 10**6]}, "input_ids"),
        ("/generate", {"input_ids": [[1], [-1]]}, "input_ids"),
        ("/generate", {"input_ids": ["1", 1]}, "input_ids"),
        ("/generate", {"input_ids": [1.0]}, "input_ids"),
        ("/generate", {"input_ids": [1], "token_ids_logprob": [10**6]}, "token_ids_logprob"),
        ("/generate", {"input_ids": [1], "top_logprobs_num": 10**6}, "top_logprobs_num"),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"logit_bias": {"1000000": 1}}},
            "sampling_params.logit_bias",
        ),
        (
            "/generate",
            {"input_ids": [1], "sampling_params": {"stop_token_ids": [10**6]}},
            "sampling_params.stop_token_ids",
        ),
        ("/generate", {"input_ids": [1], "sampling_params": {"n": 10**9}}, "n"),
        ("/generate", {"input_ids": [1], "lora_id": "x"}, "lora_id"),
        ("/generate", {"input_ids": [1], "background": True}, "background"),
        ("/generate", {"input_embeds": [[0.0]]}, "input_embeds"),
        ("/v1/completions", {"model": "m", "prompt": [10**6]}, "prompt"),
        ("/generate", b'{"input_ids": [NaN]}', "body"),
    ],
)
async def test_what_would_end_the_server_is_refused(
    url: str, session: aiohttp.ClientSession, path: str, body: Any, field: str
) -> None:
    answer = await post(session, url + path, body)
    told = json.loads(answer.body)["error"]
    assert (answer.status in (400, 501), told["field"], answer.headers[REASON]) == (True, field, told["reason"])


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/flush_cache", "/server_info", "/update_weights_from_disk", "/"]
)
async def test_admin_routes_are_closed(url: str, session: aiohttp.ClientSession, path: str) -> None:
    for method in ("GET", "POST"):
        answer = await post(session, url + path, {}, method=method)
        assert (answer.status, answer.headers[REASON]) == (404, "VERB_UNKNOWN")


async def test_a_request_waits_for_the_gate_as_long_as_it_says(
    url: str, gate: Gate, session: aiohttp.ClientSession
) -> None:
    body = {"input_ids": encode("1"), "sampling_params": GREEDY}
    gate.put(state=STAGE_STATE_PAUSED)
    refused = await post(session, f"{url}/generate", body, **{"X-RLCTL-Wait": "0"})
    assert (refused.status, refused.headers["Retry-After"], refused.headers[REASON]) == (503, "1", "STAGE_NOT_SERVING")
    assert (await post(session, f"{url}/health", None, method="GET")).status == 503
    waiting = asyncio.create_task(post(session, f"{url}/generate", body))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    gate.put(state=STAGE_STATE_READY)
    assert (await waiting).status == 200
    assert (await post(session, f"{url}/health", None, method="GET")).status == 200
    newer = {"X-RLCTL-Min-Version": "2", "X-RLCTL-Wait": "0"}
    assert (await post(session, f"{url}/generate", body, **newer)).headers[REASON] == "VERSION_TOO_OLD"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_gate_ends_is_never_whole(
    driver: Driver, url: str, gate: Gate, session: aiohttp.ClientSession, stream: bool
) -> None:
    body = {"input_ids": encode("1"), "stream": stream, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    asking = asyncio.create_task(post(session, f"{url}/generate", body))
    await until(lambda: driver.engine._requests.active)
    await asyncio.sleep(0.3 * stream)
    gate.put(state=STAGE_STATE_DIRTY, vouched=False)
    if stream:
        with pytest.raises(aiohttp.ClientPayloadError):
            await asking
    else:
        assert (await asking).headers[REASON] == "STAGE_NOT_SERVING"
    await until(lambda: not driver.engine._requests.active)


@pytest.mark.parametrize("fields", [{}, {"rid": "mine"}, {"rid": "m"}])
async def test_aborts_come_back_as_the_server_says_them(
    driver: Driver, url: str, session: aiohttp.ClientSession, fields: dict[str, str]
) -> None:
    body = {"input_ids": encode("1"), "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}, **fields}
    asking = asyncio.create_task(post(session, f"{url}/generate", body))
    await until(lambda: driver.engine._requests.active)
    await asyncio.sleep(0.3)
    request = AbortRequest(rids=[fields["rid"]]) if fields else AbortRequest(abort_all=True)
    assert (await driver.rollout.acall(driver.engine.abort(request))).aborted == 1
    told = json.loads((await asking).body)
    assert told["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < told["meta_info"]["completion_tokens"] < 400


async def test_an_id_in_use_is_refused(driver: Driver, url: str, session: aiohttp.ClientSession) -> None:
    body = {"input_ids": encode("1"), "rid": "twice", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    first = asyncio.create_task(post(session, f"{url}/generate", body))
    await until(lambda: driver.engine._requests.active)
    assert (await post(session, f"{url}/generate", body)).headers[REASON] == "RID_IN_USE"
    assert (await first).status == 200


async def test_a_caller_that_leaves_ends_its_request(driver: Driver, url: str, session: aiohttp.ClientSession) -> None:
    body = {"input_ids": encode("1"), "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    asking = asyncio.create_task(post(session, f"{url}/generate", body))
    await until(lambda: driver.engine._requests.active)
    await asyncio.sleep(0.3)
    asking.cancel()
    await until(lambda: not driver.engine._requests.active)
