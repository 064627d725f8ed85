"""OpenAI's routes over a fleet of fake engines, whose tokens are numbers that go on from the last one of the prompt."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from http_calls import nested, post

from rlctl.sampling import MOST_SAMPLES

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
