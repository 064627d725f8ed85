"""Cases of SkyRL's tests of its RemoteInferenceClient (a9564572), asked of a fleet of fake engines.

Written from reading them. What SkyRL's own suite finds different, and why, stands in docs/dialects.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from waiting import eventually

from rlctl.testing.in_process_fleet import InProcessFleet

SERVERS = ("/engines/a", "/engines/b")
"""The client sends what controls to each server, and what generates to the root."""


@pytest.fixture
async def http(fleet: InProcessFleet, open_gateway: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with open_gateway(fleet.server.address, "vllm") as http:
        yield http


async def ask(http: aiohttp.ClientSession, path: str, body: Any = None, **params: Any) -> tuple[int, Any]:
    async with http.post(path, json=body, params=params) as response:
        if response.content_type != "application/json":
            return response.status, await response.text()
        return response.status, await response.json()


async def every(http: aiohttp.ClientSession, path: str, body: Any = None, **params: Any) -> list[tuple[int, Any]]:
    return await asyncio.gather(*(ask(http, server + path, body, **params) for server in SERVERS))


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_every_server_is_paused_and_resumed(http: aiohttp.ClientSession, mode: str) -> None:
    for status, body in await every(http, "/pause", mode=mode, clear_cache="false"):
        assert (status, body["status"]) == (200, "paused")
    for status, body in await every(http, "/resume"):
        assert (status, body["status"]) == (200, "resumed")


async def test_sleep_and_wake_with_tags_as_repeated_parameters(http: aiohttp.ClientSession) -> None:
    for path, status in (("/sleep?level=1&tags=weights&tags=kv_cache", 200), ("/wake_up?tags=weights", 200)):
        assert {told for told, _ in await every(http, path)} == {status}
    for server in SERVERS:
        async with http.get(f"{server}/is_sleeping") as response:
            assert await response.json() == {"is_sleeping": True}, "the KV cache is missing"
    assert {told for told, _ in await every(http, "/wake_up?tags=kv_cache")} == {200}
    status, told = await ask(http, "/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 2}})
    assert (status, told["choices"][0]["token_ids"]) == (200, [2, 3])


async def test_level_1_after_level_2_has_no_weights_to_keep(http: aiohttp.ClientSession) -> None:
    assert {told for told, _ in await every(http, "/sleep", level="2")} == {200}
    for status, told in await every(http, "/sleep", level="1"):
        assert (status, told["error"]["reason"]) == (400, "MEMORY_RELEASED")


async def test_frozen_requests_are_not_ended_by_another_pause(
    http: aiohttp.ClientSession, fleet: InProcessFleet
) -> None:
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 300}}
    asked = [asyncio.create_task(ask(http, f"{server}/inference/v1/generate", body)) for server in SERVERS]
    await eventually(lambda: all(stage._engine._running for stage in fleet.stages.values()))  # type: ignore[attr-defined]
    await every(http, "/pause", mode="keep", clear_cache="false")
    for status, told in await every(http, "/pause", mode="abort", clear_cache="false"):
        assert (status, told["error"]["reason"]) == (400, "PAUSE_MODE_CONFLICT")
    await every(http, "/resume")
    for status, told in await asyncio.gather(*asked):
        assert (status, told["choices"][0]["finish_reason"]) == (200, "length")
        assert len(told["choices"][0]["token_ids"]) == 300


async def test_a_session_that_ends_is_forgotten_also_one_that_is_unknown(http: aiohttp.ClientSession) -> None:
    for session in ("trajectory-1", "trajectory-1", "nobody"):
        assert await ask(http, "/finish_session", None, session_id=session) == (200, {"status": "ok"})


async def test_an_adapter_is_loaded_again_and_unloaded_and_an_unknown_one_is_404(
    http: aiohttp.ClientSession, checkpoint: Any
) -> None:
    for version in ("v1", "v2"):
        body = {"lora_name": "x", "lora_path": checkpoint(version)}
        for status, told in await every(http, "/skyrl/v1/load_lora_adapter", body):
            assert status == 200, told
            assert "Success" in told
            assert "x" in told
    for status, told in await every(http, "/v1/unload_lora_adapter", {"lora_name": "nobody"}):
        assert (status, told["error"]["reason"]) == (404, "ADAPTER_NOT_FOUND")
    for status, told in await every(http, "/v1/unload_lora_adapter", {"lora_name": "x"}):
        assert status == 200, told


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/fetch_weights", {"target_version": 3, "sync_dir": "gs://bucket"}, 404),
        ("/skyrl/v1/generate", {"token_ids": [1], "sampling_params": {}}, 400),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}}}, 400),
        (
            "/v1/chat/completions/render",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            400,
        ),
        ("/inference/v1/generate", {"token_ids": [1], "model": "nobody"}, 404),
    ],
)
async def test_what_is_not_there_says_so(http: aiohttp.ClientSession, path: str, body: Any, status: int) -> None:
    told, answer = await ask(http, path, body)
    assert (told, bool(answer["error"]["message"])) == (status, True), answer


async def test_prompt_log_probabilities_and_several_samples(http: aiohttp.ClientSession) -> None:
    sampling = {"n": 2, "temperature": 1.0, "max_tokens": 3, "logprobs": 0}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling, "model": "default"}
    status, told = await ask(http, "/inference/v1/generate", body)
    assert (status, len(told["choices"])) == (200, 2)
    for choice in told["choices"]:
        assert choice["token_ids"] == [4, 5, 6]
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-1.0] * 3
        assert choice["finish_reason"] == "length"
