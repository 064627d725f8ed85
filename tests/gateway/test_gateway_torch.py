"""Generation through the gateway with a real model: OpenAI's routes, the native one, and what a real engine refuses."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from http_calls import events, post

from rlctl.demo import tiny
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec


@pytest.fixture
async def http(
    chat_model: str, tmp_path: Path, make_gateway: Callable[..., Any]
) -> AsyncIterator[aiohttp.ClientSession]:
    specs = [StageSpec(slot, chat_model, engine="torch") for slot in ("a", "b")]
    async with InProcessFleet(tmp_path / "journal.db", specs) as fleet, make_gateway(fleet) as (_, http):
        yield http


async def chunks(http: aiohttp.ClientSession, path: str, body: Any) -> list[Any]:
    async with http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        return events(await response.text())


async def test_openai_and_native_say_the_same(http: aiohttp.ClientSession) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    ids = [tiny.VOCABULARY.index(c) for c in "3+5="]
    _, native = await post(http, {"input_ids": ids, "sampling_params": greedy, "return_logprob": True}, "/generate")
    text, values = native["text"], [value for value, _, _ in native["meta_info"]["output_token_logprobs"]]
    openai = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "model": "actor"}

    status, reply = await post(http, {**openai, "prompt": ids, "logprobs": 2}, "/v1/completions")
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"], reply["object"]) == (text, "length", "text_completion")
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(values)
    tokens = choice["logprobs"]["tokens"]
    assert "".join(token for token in tokens if token[0] != "<") == text, "special tokens are named"
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert reply["weight_version_seq"] == 1

    asked = {**openai, "messages": [{"role": "user", "content": "3+"}, {"role": "user", "content": "5"}]}
    status, reply = await post(http, {**asked, "logprobs": True, "top_logprobs": 1}, "/v1/chat/completions")
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(values)

    told = await chunks(http, "/v1/completions", {**openai, "prompt": ids})
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == text
    told = await chunks(http, "/v1/chat/completions", {**asked, "stream_options": {"include_usage": True}})
    assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in told[:-1]) == text
    assert (told[-2]["choices"][0]["finish_reason"], told[-1]["choices"]) == ("length", [])
    assert told[-1]["usage"]["completion_tokens"] == 6


async def test_groups_and_seeds(http: aiohttp.ClientSession) -> None:
    body = {"model": "actor", "prompt": ["1+1=", "2+2="], "n": 3, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    _, first = await post(http, body, "/v1/completions")
    _, again = await post(http, body, "/v1/completions")
    texts = [choice["text"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == list(range(6))
    assert texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts[:3])) > 1, "the samples of a group differ"
    assert first["usage"]["prompt_tokens"] == 8, "each prompt is counted once"


async def test_prompts_are_scored(http: aiohttp.ClientSession) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    status, reply = await post(http, {**body, "logprob_start_len": 0}, "/generate")
    assert status == 200, reply
    entries = reply["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in entries] == [5, 6, 7]
    assert entries[0][0] is None
    assert all(value < 0 for value, _, _ in entries[1:])


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/generate", {"text": "1", "sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature"),
    ("/generate", {"text": "1", "sampling_params": {"regex": "a"}}, 400, "engine_fields"),
    ("/generate", {"input_ids": [99999]}, 400, "input_ids"),
    ("/v1/completions", {"prompt": "1", "model": "actor:none"}, 404, "model"),
    ("/v1/completions", {"model": "actor"}, 400, "prompt"),
    ("/v1/completions", {"prompt": [[-1]]}, 400, "prompt"),
    ("/v1/completions", {"prompt": "1", "max_tokens": "x"}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "1", "temperature": "x"}, 400, "temperature"),
    ("/v1/completions", {"prompt": "1", "echo": True}, 400, "echo"),
    ("/v1/completions", {"prompt": "1", "n": 0}, 400, "n"),
    ("/v1/completions", {"prompt": "1", "logprobs": 50}, 400, "logprobs"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "1"}]}, 400, "messages[0].role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "tools": [{}]}, 400, "tools"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "top_logprobs": 3}, 400, "logprobs"),
]


async def test_bad_input_names_its_field(http: aiohttp.ClientSession) -> None:
    for path, wrong, status, field in BAD:
        got, reply = await post(http, wrong, path)
        assert got == status, reply
        assert field in reply["error"]["param"]
    for path, body in (
        ("/generate", {"input_ids": [5] * 600}),
        ("/generate", {"input_ids": [5] * 600, "stream": True}),
        ("/v1/completions", {"prompt": [5] * 600, "model": "actor"}),
    ):
        got, reply = await post(http, body, path)
        assert (got, reply["error"]["reason"]) == (400, "PROMPT_TOO_LONG"), reply
        assert reply["error"]["param"] in ("input_ids", "text"), reply


async def test_openais_own_client(http: aiohttp.ClientSession) -> None:
    script = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).parents[2] / "examples" / "integrations" / "openai" / "chat.py")),
        *(f"--base-url=http://{http._base_url.authority}", "--prompt=3+5="),  # type: ignore[union-attr]
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await script.communicate()
    assert script.returncode == 0
    told = {line["call"]: line for line in map(json.loads, output.decode().splitlines())}
    assert told["models"]["model"] == "actor"
    completion = told["completions"]
    assert (len(completion["token_ids"]), len(completion["logprobs"])) == (6, 6)
    assert (completion["weight_version_seq"], completion["finish_reason"]) == (1, "length")
    assert completion["usage"] == told["completions, streamed"]["usage"]
    assert completion["text"] == told["completions, streamed"]["text"]
    assert told["chat, streamed"]["content"] == told["chat"]["content"]
    assert len(told["chat, two answers"]["contents"]) == 2
    assert told["an error"]["status"] == 400
