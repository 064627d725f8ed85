"""OpenAI's routes over a fleet of fake engines, whose tokens are numbers that go on from the last one of the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from http_calls import events, nested, post

from rlctl.contract.errors import Reason
from rlctl.contract.sampling import MOST_SAMPLES
from rlctl.gateway.generation.samples import _Text
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import rollout_pb2 as r

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"n": MOST_SAMPLES + 1}, "n"),
        ({"prompt": ["x"] * 5, "n": 2000}, "n"),
        ({"prompt": ["x"] * 10_000}, "prompt"),
        ({"logit_bias": nested(30)}, "logit_bias"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": nested(300)}}}, "response_format"),
    ],
)
async def test_bad_input_names_its_field(http: aiohttp.ClientSession, wrong: Any, field: str) -> None:
    for stream in (False, True):
        status, reply = await post(http, {"prompt": "x", "stream": stream, **wrong}, COMPLETIONS)
        assert status == 400, reply
        assert reply["error"]["field"].startswith(field), reply


async def test_the_largest_seed_has_one_after_it(http: aiohttp.ClientSession) -> None:
    status, reply = await post(http, {"prompt": "x", "n": 2, "seed": 2**64 - 1}, COMPLETIONS)
    assert status == 200, reply


async def streamed(http: aiohttp.ClientSession, body: Any, path: str = COMPLETIONS) -> list[Any]:
    async with http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        return events(await response.text())


async def test_offsets_go_on_from_event_to_event(http: aiohttp.ClientSession) -> None:
    body = {"prompt": [1], "max_tokens": 20, "logprobs": 0}
    _, whole = await post(http, body, COMPLETIONS)
    told = await streamed(http, body)
    assert len(told) > 1
    offsets = [offset for event in told for choice in event["choices"] for offset in choice["logprobs"]["text_offset"]]
    assert offsets == whole["choices"][0]["logprobs"]["text_offset"]


async def test_a_stop_that_lies_across_a_cut_ends_a_stream_where_it_ends_a_whole_answer(
    http: aiohttp.ClientSession, fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(request: r.GenerateRequest) -> AsyncIterator[r.GenerateResponse]:
        """One engine dies in the midst of it."""
        if len(request.input_ids.ids) == 1:
            yield r.GenerateResponse(samples=[r.Sample(output_ids=[2, 3], text="ab", completion_tokens=2)])
            await asyncio.sleep(0.05)
            raise Reason.ENGINE_FAILED.error("it died")
        sample = r.Sample(output_ids=[4, 5], text="cd", completion_tokens=2)
        sample.finish_reason.type = r.FINISH_TYPE_LENGTH
        yield r.GenerateResponse(samples=[sample])

    for stage in fleet.stages.values():
        monkeypatch.setattr(stage._engine, "generate", generate)
    body = {"prompt": [1], "max_tokens": 40, "stop": "bc"}
    _, whole = await post(http, body, COMPLETIONS)
    told = await streamed(http, body)
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("a", "stop")
    assert "".join(choice["text"] for event in told for choice in event["choices"]) == "a"
    assert told[-1]["choices"][0]["finish_reason"] == "stop"
    native = {"input_ids": [1], "sampling_params": {"stop": ["bc"], "max_new_tokens": 40}}
    assert [event["text"] for event in await streamed(http, native, "/generate")] == ["a", "a"]


@pytest.mark.parametrize("stops", [[], ["stop"], ["xs", "st", "top"]])
def test_what_may_begin_a_stop_is_told_once_it_does_not(stops: list[str]) -> None:
    whole = "a stxstto st"
    for size in (1, 2, 5, len(whole)):
        text, told = _Text(stops), ""
        for at in range(0, len(whole), size):
            told += text.more(whole[at : at + size])
            assert whole.startswith(told)
            had = at + size
            begun = [at for stop in stops for at in range(had) if whole.startswith(stop, at) and at + len(stop) > had]
            assert len(told) <= min(begun, default=had)
        assert told + text.rest(whole) == whole
