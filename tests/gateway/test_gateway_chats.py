"""Chats: what of a template is the caller's, and that none keeps the others waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from http_calls import events, post

from rlctl.gateway.backend import tokenizers
from rlctl.gateway.backend.tokenizers import LONG, Tokenizer
from rlctl.testing.in_process_fleet import InProcessFleet

CHATS = "/v1/chat/completions"


@pytest.fixture
async def http(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], chat_model: str
) -> AsyncIterator[aiohttp.ClientSession]:
    async with make_gateway(fleet, tokenizer=chat_model) as (_, http):
        yield http


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", "{% for i in range(9000) %}{% for j in range(20000) %}{% endfor %}{% endfor %}1"),
        ("conversation", 1),
        ("tokenize", False),
        ("tokenizer_kwargs", {"truncation": True}),
        ("padding", "max_length"),
        ("max_length", 1 << 40),
        ("truncation", True),
        ("return_tensors", "np"),
        ("return_dict", True),
    ],
)
async def test_what_is_not_the_callers_to_set_is_refused_by_name(
    http: aiohttp.ClientSession, name: str, value: Any
) -> None:
    status, reply = await post(http, chat("1", chat_template_kwargs={name: value}), CHATS)
    assert (status, reply["error"]["field"]) == (400, f"chat_template_kwargs.{name}"), reply


async def test_what_a_template_does_not_take_is_refused(http: aiohttp.ClientSession) -> None:
    status, reply = await post(http, chat("1", chat_template_kwargs={"tools": 5}), CHATS)
    assert (status, reply["error"]["field"]) == (400, "messages"), reply
    status, reply = await post(http, chat("1", chat_template_kwargs={"enable_thinking": False}), CHATS)
    assert status == 200, reply


async def test_a_refused_chat_is_no_stream(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], chat_model: str
) -> None:
    async with make_gateway(fleet, tokenizer=chat_model, max_inflight=1) as (server, http):
        status, reply = await post(http, chat("1", lora_path="nobody", stream=True), CHATS)
        assert (status, reply["error"]["reason"]) == (404, "ADAPTER_NOT_FOUND"), reply
        async with http.post(CHATS, json=chat("1", stream=True)) as response:
            told = events(await response.text())
        assert told[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert [event for event in told if "role" in event["choices"][0]["delta"]] == told[:1]
        server.generation.inflight = 1
        async with http.post(CHATS, json=chat("1", stream=True)) as response:
            assert (response.status, response.headers.get("Retry-After")) == (503, "1"), "clients try again"
        server.generation.inflight = 0


async def test_a_long_chat_keeps_nobody_waiting(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, render = threading.Event(), Tokenizer._chat

    def slow(*arguments: Any) -> list[int]:
        assert going_on.wait(10.0)
        return render(*arguments)

    monkeypatch.setattr(Tokenizer, "_chat", slow)
    long = asyncio.create_task(post(http, chat("1" * LONG), CHATS))
    status, _ = await post(http, {"text": "x", "sampling_params": {"max_new_tokens": 1}})
    assert status == 200
    assert not long.done()
    going_on.set()
    status, reply = await long
    assert (status, reply["usage"]["prompt_tokens"]) == (200, LONG + 1), reply


async def test_a_tokenizer_that_is_never_read_holds_no_request_for_ever(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory may be on a file system that does not answer."""
    go_on = threading.Event()

    def stuck(path: str) -> str:
        go_on.wait(20)
        return path

    monkeypatch.setattr(tokenizers, "Tokenizer", stuck)
    try:
        async with make_gateway(fleet, tokenizer="directory", timeout_s=0.2) as (_, http), asyncio.timeout(10):
            for _ in range(2):
                status, reply = await post(http, chat("1"), CHATS)
                assert (status, reply["error"]["reason"]) == (504, "DEADLINE_EXCEEDED"), reply
                assert "the tokenizer of actor was not read" in reply["error"]["message"]
    finally:
        go_on.set()


async def test_a_chat_of_token_ids_is_not_rendered_and_returns_sglangs_meta_info(http: aiohttp.ClientSession) -> None:
    """Miles's session server keeps the tokens of a conversation itself."""
    body = chat("not rendered", input_ids=[7, 8], max_tokens=3, n=2, logprobs=True, return_meta_info=True)
    status, reply = await post(http, body, CHATS)
    assert status == 200, reply
    assert reply["usage"]["prompt_tokens"] == 2
    for choice in reply["choices"]:
        meta = choice["meta_info"]
        assert [entry[:2] for entry in meta["output_token_logprobs"]] == [[-1.0, token] for token in (9, 10, 11)]
        assert (meta["completion_tokens"], meta["finish_reason"]["type"]) == (3, "length")
        assert (meta["weight_version"], meta["prompt_tokens"]) == ("initial", 2)
    status, reply = await post(http, chat("1", max_tokens=0, input_ids=[7], return_meta_info=True), CHATS)
    assert (status, reply["choices"][0]["meta_info"]["weight_version"]) == (200, "initial"), reply


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"return_meta_info": True, "stream": True}, 400, "return_meta_info"),
        ({"input_ids": [-1]}, 400, "input_ids"),
        ({"input_ids": [1.5]}, 400, "input_ids[0]"),
        ({"input_ids": [1], "tools": [{"type": "function"}]}, 400, "tools"),
    ],
)
async def test_what_a_chat_of_token_ids_cannot_have(
    http: aiohttp.ClientSession, fields: dict[str, Any], status: int, field: str
) -> None:
    told, reply = await post(http, chat("1", **fields), CHATS)
    assert (told, reply["error"]["field"]) == (status, field), reply
