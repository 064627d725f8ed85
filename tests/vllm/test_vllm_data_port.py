"""The data port in front of a real vLLM server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from passing_suite import Gate, compare, open_gate, port, post, until
from rlctl_vllm.requests import passing
from server_stage import Driver

from rlctl.demo.tiny import encode
from rlctl.runtime.http_errors import REASON
from rlctl.v1.common_pb2 import STAGE_STATE_DIRTY
from rlctl.v1.rollout_pb2 import AbortRequest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

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
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
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
        {"model": "no such model"},
        {"no_such_field": 1},
        {"return_token_ids": True},
        {"request_id": "mine"},
    ]
    asked = {"model": "rlctl", "max_tokens": 5, "temperature": 0}
    made: list[tuple[str, Any]] = [
        ("/v1/completions", {**asked, "prompt": prompt, **each})
        for prompt, each in itertools.product(["12+34", ids, ["1", "2"], [ids, encode("8")]], options)
        if each.get("model") is None
    ]
    messages = [{"role": "user", "content": "1 2 3"}]
    made += [
        ("/v1/chat/completions", {**asked, "messages": messages, **each})
        for each in options
        if "logprobs" not in each and each.get("model") is None
    ]
    made += [
        (
            "/inference/v1/generate",
            {"token_ids": ids, "sampling_params": {"max_tokens": 4, "temperature": 0, **each}, **more},
        )
        for each, more in itertools.product([{}, {"n": 2}, {"logprobs": 1}, {"top_k": -7}], [{}, {"stream": True}])
    ]
    made += [
        ("/tokenize", {"prompt": "1 2 3", "model": "rlctl"}),
        ("/detokenize", {"tokens": ids, "model": "rlctl"}),
        ("/v1/models", None),
        ("/version", None),
        ("/v1/embeddings", {"model": "rlctl", "input": "1"}),
        ("/v1/completions", b"[1]"),
    ]
    return made


async def test_answers_are_those_of_the_server(driver: Driver, url: str) -> None:
    http = driver.engine.http
    requests = bodies()
    assert len(requests) > 90
    differing = await compare(http.url, url, requests, socket=http._socket)
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
