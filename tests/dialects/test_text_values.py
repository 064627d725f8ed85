"""Numbers and flags as texts, which the originals' schemas take, are taken in each dialect."""

from __future__ import annotations

from typing import Any

import pytest
from http_calls import post

from rlctl.testing.in_process_fleet import InProcessFleet

GROUP = {"master_address": "127.0.0.1", "master_port": "29500", "rank_offset": "1", "world_size": "9"}


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("sglang", "/init_weights_update_group", GROUP),
        ("slime", "/init_weights_update_group", GROUP),
        ("omni", "/init_weights_update_group", GROUP),
        ("vllm", "/init_weight_transfer_engine", {"init_info": {**GROUP, "packed": "false"}}),
        ("vllm", "/init_weight_transfer", GROUP),
    ],
)
async def test_a_groups_numbers_are_compared_as_numbers(
    fleet: InProcessFleet, open_gateway: Any, name: str, path: str, body: Any
) -> None:
    async with open_gateway(fleet.server.address, name) as http:
        _, told = await post(http, body, path)
    assert "world_size is 9; one source and the ranks of 2 stages make 4" in str(told)


@pytest.mark.parametrize("name", ["sglang", "slime", "omni"])
async def test_flags_of_an_update_are_read(
    fleet: InProcessFleet, open_gateway: Any, name: str, checkpoint: Any
) -> None:
    body = {
        "model_path": checkpoint("new"),
        "flush_cache": "true",
        "abort_all_requests": "False",
        "keep_pause": "1",
        "token_step": "3",
    }
    async with open_gateway(fleet.server.address, name) as http:
        status, told = await post(http, body, "/update_weights_from_disk")
        assert status == 200, told
        status, told = await post(http, {**body, "keep_pause": "perhaps"}, "/update_weights_from_disk")
        assert status == (422 if name == "omni" else 400)
        assert "keep_pause" in str(told)
    assert all(stage.report.paused for stage in fleet.server.coordinator.roster.fleet().stages), "keep_pause"


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("sglang", "/generate", {"input_ids": [7], "stream": "false", "sampling_params": {"max_new_tokens": "2"}}),
        ("sglang", "/v1/completions", {"prompt": [7], "max_tokens": "2", "temperature": "0.5", "n": "1"}),
        ("vllm", "/v1/completions", {"prompt": [7], "max_tokens": "2", "ignore_eos": "true", "top_k": "-1"}),
        ("vllm", "/inference/v1/generate", {"token_ids": ["7"], "sampling_params": {"max_tokens": "2", "n": "1"}}),
    ],
)
async def test_generation_takes_them(fleet: InProcessFleet, open_gateway: Any, name: str, path: str, body: Any) -> None:
    async with open_gateway(fleet.server.address, name) as http:
        status, told = await post(http, body, path)
    assert status == 200, told
    assert 2 in (told.get("usage", {}).get("completion_tokens"), told.get("meta_info", {}).get("completion_tokens"))
