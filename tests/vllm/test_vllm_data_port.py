"""The data port in front of a real vLLM server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from passing_suite import LABEL, Gate, clients_bodies, compare, open_gate, passed_on, peaked, port, post, until
from rlctl_vllm.requests import passing
from server_stage import Driver

from rlctl.demo.tiny import encode
from rlctl.runtime.http_errors import REASON
from rlctl.v1.common_pb2 import STAGE_STATE_DIRTY
from rlctl.v1.rollout_pb2 import AbortRequest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "add"}}
SKYRLS_OWN = "/skyrl/v1/generate"
"""A route that SkyRL adds to its servers."""
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture
def gate(driver: Driver) -> Gate:
    return open_gate(driver)


@pytest.fixture
async def url(driver: Driver, gate: Gate) -> AsyncIterator[str]:
    async with port(driver, gate, passing.routes()) as url:
        yield url


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def bodies() -> list[tuple[str, Any]]:
    """What clients of vLLM send: completions, chats, token ids; right and wrong."""
    ids = encode("12+34")
    options: list[dict[str, Any]] = [
        {},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"n": 2, "temperature": 1.0},
        {"n": 2},
        {"stop": "3"},
        {"stop_token_ids": [5], "min_tokens": 1},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"seed": 3, "user": "somebody"},
        {"echo": True},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"logit_bias": {"3": 5}},
        {"max_tokens": 0},
        {"temperature": -1},
        {"no_such_field": 1},
        {"return_token_ids": True},
        {"request_id": "mine"},
    ]
    asked = {"model": "actor", "max_tokens": 5, "temperature": 0}
    streaming = [{}, {"stream": True}]
    made: list[tuple[str, Any]] = [
        ("/v1/completions", {**asked, "prompt": prompt, **each, **stream})
        for prompt, each, stream in itertools.product(
            ["12+34", ids, ["1", "2"], [ids, encode("8")]], options, streaming
        )
    ]
    messages = [{"role": "user", "content": "1 2 3"}]
    chat: list[dict[str, Any]] = [
        *(each for each in options if "logprobs" not in each),
        {"logprobs": True, "top_logprobs": 2},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
        *({"tools": TOOLS, **each} for each in ({}, {"tool_choice": "none"}, {"tool_choice": NAMED})),
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "1"}]}]},
    ]
    made += [
        ("/v1/chat/completions", {**asked, "messages": messages, **each, **stream})
        for each, stream in itertools.product(chat, streaming)
    ]
    native: list[dict[str, Any]] = [
        {},
        {"n": 2, "temperature": 1.0},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"top_k": -7},
        {"stop_token_ids": [5], "min_tokens": 1},
        {"max_tokens": 1},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"logit_bias": {"3": 5}},
        {"top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1},
    ]
    made += [
        (
            "/inference/v1/generate",
            {"token_ids": ids, "sampling_params": {"max_tokens": 4, "temperature": 0, **each}, **more},
        )
        for each, more in itertools.product(
            native, [{}, {"stream": True}, {"request_id": "mine"}, {"output_mode": "text"}]
        )
    ]
    made += [
        ("/v1/messages", {**asked, "messages": messages}),
        ("/v1/messages/count_tokens", {"model": "actor", "messages": messages}),
        ("/v1/completions/render", {**asked, "prompt": "12+34"}),
        ("/v1/chat/completions/render", {**asked, "messages": messages}),
        ("/pooling", {"model": "actor", "input": "1"}),
        ("/classify", {"model": "actor", "input": "1"}),
        ("/score", {"model": "actor", "text_1": "1", "text_2": "2"}),
    ]
    made += [
        ("/tokenize", {"prompt": "1 2 3", "model": "actor"}),
        ("/detokenize", {"tokens": ids, "model": "actor"}),
        ("/v1/models", None),
        ("/version", None),
        ("/v1/embeddings", {"model": "actor", "input": "1"}),
        ("/v1/completions", b"[1]"),
    ]
    return made


@pytest.mark.timeout(800)
async def test_answers_are_those_of_the_server(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    """Through stage and gateway, and at the data port alone where the gateway has answers of its own."""
    checkpoint = peaked(tiny, tmp_path / "peaked")
    sent = [request for request in clients_bodies("vllm", checkpoint) if request[0] != SKYRLS_OWN]
    requests = bodies() + sent
    reads = [request for request in requests if request[1] is None]
    posts = [request for request in requests if request[1] is not None]
    assert len(posts) > 240
    async with passed_on("vllm", checkpoint, tmp_path) as passed:
        http = passed.engine.http

        def renamed(body: Any) -> tuple[Any, dict[bytes, bytes]]:
            names = {passed.label.encode(): LABEL.encode()}
            if not isinstance(body, dict) or "model" not in body:
                return body, names
            return {**body, "model": "rlctl"}, names | {b'"rlctl"': json.dumps(body["model"]).encode()}

        differing = [
            *await compare(http.url, passed.port, reads, socket=http._socket, renamed=renamed),
            *await compare(http.url, passed.gateway, posts, socket=http._socket, renamed=renamed),
        ]
    assert not differing, "\n".join(differing)


@pytest.mark.parametrize("name", ["actor", "default", "rlctl"])
async def test_a_model_has_the_names_of_the_fleet(url: str, session: aiohttp.ClientSession, name: str) -> None:
    body = {"model": name, "prompt": encode("1"), "max_tokens": 2}
    answer = await post(session, f"{url}/v1/completions", body)
    assert (answer.status, json.loads(answer.body)["model"]) == (200, name)
    other = await post(session, f"{url}/v1/completions", {**body, "model": "other"})
    assert other.headers[REASON] == "MODEL_NOT_FOUND"


async def test_what_would_harm_the_server_is_refused(url: str, session: aiohttp.ClientSession) -> None:
    for body, field in (
        ({"n": 10**9}, "n"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ):
        answer = await post(session, f"{url}/v1/completions", {"prompt": [1], **body})
        assert json.loads(answer.body)["error"]["field"] == field
    for path in ("/pause", "/sleep", "/collective_rpc", "/v1/load_lora_adapter", "/server_info"):
        assert (await post(session, url + path, {})).headers[REASON] == "VERB_UNKNOWN"


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_aborts_come_back_as_the_server_says_them(
    driver: Driver, url: str, session: aiohttp.ClientSession, path: str
) -> None:
    native: dict[str, Any] = {"token_ids": encode("1"), "sampling_params": LONG}
    body = native if "inference" in path else {"prompt": encode("1"), **LONG}
    asking = asyncio.create_task(post(session, url + path, body))
    await until(lambda: driver.engine._requests.active)
    await asyncio.sleep(0.3)
    (rid,) = driver.engine._requests._running
    assert (await driver.rollout.acall(driver.engine.abort(AbortRequest(rids=[rid])))).aborted == 1
    answer = await asking
    assert answer.status == 200
    assert b'"finish_reason":"abort"' in answer.body


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_gate_ends_is_never_whole(
    driver: Driver, url: str, gate: Gate, session: aiohttp.ClientSession, stream: bool
) -> None:
    body = {"prompt": encode("1"), "stream": stream, **LONG, "max_tokens": 450}
    asking = asyncio.create_task(post(session, f"{url}/v1/completions", body))
    await until(lambda: driver.engine._requests.active)
    await asyncio.sleep(0.3 * stream)
    gate.put(state=STAGE_STATE_DIRTY, vouched=False)
    if stream:
        with pytest.raises(aiohttp.ClientPayloadError):
            await asking
    else:
        assert (await asking).headers[REASON] == "STAGE_NOT_SERVING"
    await until(lambda: not driver.engine._requests.active)
