"""An answer without tokens names the version of the weights in each dialect that has a field for it."""

from __future__ import annotations

from typing import Any

import pytest
from http_calls import events, post

from rlctl.launch.fleet_controller import LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

SCORED = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True}


@pytest.mark.parametrize("dialect", ["sglang", "slime", "omni"])
async def test_generate_names_the_version(torch_fleet: LaunchedFleet, open_gateway: Any, dialect: str) -> None:
    async with open_gateway(torch_fleet.address, dialect) as http:
        for body in (SCORED, {**SCORED, "stream": True}):
            async with http.post("/generate", json=body) as response:
                assert response.status == 200, await response.text()
                told = events(await response.text())[-1] if body.get("stream") else await response.json()
            meta = told["meta_info"]
            async with http.get("/model_info") as response:
                served = (await response.json())["weight_version"]
            assert (meta["completion_tokens"], meta["weight_version"]) == (0, served)


async def test_openais_answer_has_the_sequence(torch_fleet: LaunchedFleet, open_gateway: Any) -> None:
    async with open_gateway(torch_fleet.address, "vllm") as http:
        status, one = await post(http, {"prompt": [5, 6], "max_tokens": 1}, "/v1/completions")
        assert status == 200, one
        status, none = await post(http, {"prompt": [5, 6], "max_tokens": 0}, "/v1/completions")
        assert (status, none["usage"]["completion_tokens"]) == (200, 0), none
        assert none["weight_version_seq"] == one["weight_version_seq"]
