"""vLLM's /inference/v1/generate and its adapters, from vLLM 0.32.0's protocol, over real HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import loras
import pytest
import torch
from vllm_server import ask, each

from rlctl.demo.tiny import encode
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.aio import AsyncFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

PATH = "/inference/v1/generate"
PROMPT = encode("1+2=")
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 6}


@pytest.fixture
async def http(
    torch_fleet: LaunchedFleet, open_gateway: Any, client: AsyncFleet, tiny: tuple[Any, Path]
) -> AsyncIterator[aiohttp.ClientSession]:
    async with open_gateway(torch_fleet.address, "vllm", tokenizer=str(tiny[1])) as http:
        yield http
    for adapter in (await client.status()).models[0].adapters:
        await client.unload_adapter(adapter.name)


async def generated(http: aiohttp.ClientSession, sampling: Any = GREEDY, **fields: Any) -> Any:
    status, told = await ask(http, PATH, {"token_ids": PROMPT, "sampling_params": sampling, **fields})
    assert status == 200, told
    return told


async def streamed(http: aiohttp.ClientSession, sampling: Any = GREEDY, **fields: Any) -> tuple[list[Any], Any]:
    """Its events, and the unknown fields."""
    body = {"token_ids": PROMPT, "sampling_params": sampling, "stream": True, **fields}
    async with http.post(PATH, json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        *events, done, end = (await response.text()).split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(each.removeprefix("data: ")) for each in events], response.headers


def scores(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log probabilities of the next token after each."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([tokens])).logits[0].float(), -1)  # type: ignore[no-any-return]


async def test_a_stream_tells_what_the_whole_answer_does(http: aiohttp.ClientSession) -> None:
    sampling = {**GREEDY, "n": 2, "logprobs": 2}
    whole = await generated(http, sampling, return_token_ids=True)
    events, _ = await streamed(
        http, sampling, return_token_ids=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    *parts, last = events
    assert [part.get("prompt_token_ids") for part in parts] == [PROMPT] + [None] * (len(parts) - 1)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    for choice in whole["choices"]:
        own = [part for part in parts if part["choices"][0]["index"] == choice["index"]]
        told = [part["choices"][0] for part in own]
        assert [token for part in told for token in part["token_ids"]] == choice["token_ids"]
        positions = [position for part in told for position in part["logprobs"]["content"]]
        for position, expected in zip(positions, choice["logprobs"]["content"], strict=True):
            for one, other in zip(position["top_logprobs"], expected["top_logprobs"], strict=True):
                assert one == {**other, "logprob": pytest.approx(other["logprob"], abs=1e-4)}
            assert {name: position[name] for name in position["top_logprobs"][0]} == position["top_logprobs"][0]
        assert [part["finish_reason"] for part in told] == [None] * (len(told) - 1) + ["length"]
        assert told[-1]["weight_versions"] == choice["weight_versions"]
        assert own[-1]["usage"]["completion_tokens"] == 6
    assert {event["request_id"] for event in events} == {parts[0]["request_id"]}


async def test_text_is_told_where_it_is_asked_for(http: aiohttp.ClientSession, tiny: tuple[Any, Path]) -> None:
    told = await generated(http, {**GREEDY, "logprobs": 0}, output_mode="text", model="actor")
    [choice] = told["choices"]
    entries = choice["logprobs"]["content"]
    assert (told["output_mode"], told["model"]) == ("text", "actor")
    assert "".join(entry["token"] for entry in entries) == choice["text"] != ""
    assert [bytes(entry["bytes"]).decode() for entry in entries] == [entry["token"] for entry in entries]
    events, _ = await streamed(http, output_mode="text")
    assert "".join(part["choices"][0]["text"] for part in events) == choice["text"]
    assert "text" not in (await generated(http))["choices"][0]


async def test_log_probabilities_of_the_prompt(http: aiohttp.ClientSession, tiny: tuple[Any, Path]) -> None:
    told = await generated(http, {**GREEDY, "prompt_logprobs": 3, "logprobs": 1, "n": 2})
    expected = scores(tiny[0], PROMPT)
    first, *positions = told["prompt_logprobs"]
    assert first is None
    assert len(positions) == len(PROMPT) - 1
    for position, token, row in zip(positions, PROMPT[1:], expected, strict=False):
        assert math.isclose(position[str(token)]["logprob"], float(row[token]), abs_tol=1e-3)
        best = [str(each) for each in row.topk(3).indices.tolist()]
        assert set(best) <= set(position) <= {*best, str(token)}
        assert [position[each]["rank"] for each in best] == [1, 2, 3]
    for choice in told["choices"]:
        for entry in choice["logprobs"]["content"]:
            assert (entry["rank"], len(entry["top_logprobs"])) == (1, 1), "greedy, and one was asked for"
    without = await generated(http)
    assert (without["prompt_logprobs"], without["choices"][0]["logprobs"]) == (None, None)
    only = await generated(http, {**GREEDY, "prompt_logprobs": 0})
    assert [set(each) for each in only["prompt_logprobs"][1:]] == [{str(token)} for token in PROMPT[1:]]
    assert only["choices"][0]["logprobs"] is None
    _, headers = await streamed(http, {**GREEDY, "prompt_logprobs": 1}, cache_salt="what SkyRL sends")
    assert headers["X-RLCTL-Unknown-Fields"] == "cache_salt, sampling_params.prompt_logprobs"


async def test_what_stopped_it(http: aiohttp.ClientSession) -> None:
    tokens = (await generated(http))["choices"][0]["token_ids"]
    stopped = (await generated(http, {**GREEDY, "stop_token_ids": [tokens[1]]}))["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", tokens[1])
    assert stopped["token_ids"] == tokens[: tokens.index(tokens[1]) + 1]


async def test_it_goes_on_to_the_end_of_the_context_unless_it_is_told_how_far(http: aiohttp.ClientSession) -> None:
    [choice] = (await generated(http, {"temperature": 0.0, "ignore_eos": True}))["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) > 16, "vLLM's server has no other bound"


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"output_mode": "images"}, 400, "output_mode"),
        ({"features": {"mm_hashes": {}}}, 400, "features"),
        ({"kv_transfer_params": {}}, 400, "kv_transfer_params"),
        ({"stream": "maybe"}, 400, "stream"),
        ({"stream_options": []}, 400, "stream_options"),
        ({"sampling_params": {"prompt_logprobs": -1}}, 400, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"prompt_logprobs": "all"}}, 400, "sampling_params.prompt_logprobs"),
        ({"token_ids": [-1]}, 400, "token_ids"),
        ({"model": "nobody"}, 404, "model"),
    ],
)
async def test_what_is_refused(http: aiohttp.ClientSession, body: Any, status: int, field: str) -> None:
    got, told = await ask(http, PATH, {"token_ids": PROMPT, **body})
    assert (got, told["error"]["field"].partition("[")[0]) == (status, field), told
    assert told["error"]["message"]


# Adapters.


async def test_adapters(
    http: aiohttp.ClientSession, client: AsyncFleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    """vLLM's texts and codes; generation by the adapter's name, in every route that names a model."""
    matrices = [loras.lora(tiny[0], seed) for seed in (1, 2)]
    paths = [loras.save(tmp_path / f"adapter-{number}", each) for number, each in enumerate(matrices)]
    body = {"lora_name": "math", "lora_path": paths[0]}
    assert (
        await each(http, "/v1/load_lora_adapter", body)
        == [(200, "Success: LoRA adapter 'math' added successfully.")] * 2
    ), "every server is told by itself"
    status, told = await ask(http, "/v1/load_lora_adapter", body)
    assert (status, told["error"]["reason"]) == (400, "ADAPTER_EXISTS")
    [card] = [card for card in (await ask(http, "/v1/models", method="GET"))[1]["data"] if card["parent"]]
    assert (card["id"], card["parent"], card["root"]) == ("math", "actor", paths[0])

    async def says() -> list[Any]:
        tokens = (await generated(http, model="math"))["choices"][0]["token_ids"]
        given = {"model": "actor:math", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        status, completed = await ask(http, "/v1/completions", given | {"return_token_ids": True})
        assert (status, completed["choices"][0]["token_ids"]) == (200, tokens), completed
        return tokens

    assert await says() == loras.merged_says(tiny[0], "1+2=", matrices[0], 6)
    replaced = {"lora_name": "math", "lora_path": paths[1]}
    assert (await ask(http, "/v1/load_lora_adapter", replaced | {"load_inplace": True}))[0] == 200
    assert await says() == loras.merged_says(tiny[0], "1+2=", matrices[1], 6)
    assert [status for status, _ in await each(http, "/skyrl/v1/load_lora_adapter", body)] == [200, 200]
    assert await says() == loras.merged_says(tiny[0], "1+2=", matrices[0], 6)

    wrong: list[tuple[str, Any, int]] = [
        ("load", {"lora_name": "x", "lora_path": str(tmp_path / "nowhere")}, 404),
        ("load", {"lora_name": "actor", "lora_path": paths[0]}, 400),
        ("load", {"lora_name": "", "lora_path": paths[0]}, 400),
        ("load", {"lora_name": "x"}, 400),
        ("load", {"lora_name": "x", "lora_path": paths[0], "is_3d_lora_weight": True}, 501),
        ("unload", {"lora_name": "x"}, 404),
        ("unload", {}, 400),
    ]
    for verb, given, expected in wrong:
        status, told = await ask(http, f"/v1/{verb}_lora_adapter", given)
        assert (status, bool(told["error"]["message"])) == (expected, True), (given, told)
    assert [adapter.name for adapter in (await client.status()).models[0].adapters] == ["math"]
    assert (
        await each(http, "/v1/unload_lora_adapter", {"lora_name": "math", "lora_int_id": None})
        == [(200, "Success: LoRA adapter 'math' removed successfully.")] * 2
    )
    assert (await ask(http, PATH, {"token_ids": PROMPT, "model": "math"}))[0] == 404
