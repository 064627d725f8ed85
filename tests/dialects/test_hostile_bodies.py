"""Whatever a body holds: a status that the dialect documents, never a defect's, and a fleet that serves afterwards."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from rlctl.gateway import dialects
from rlctl.gateway.backend.service import Settings
from rlctl.gateway.http.table import ENGINE
from rlctl.testing.in_process_fleet import InProcessFleet

FIELDS = (
    *("url", "worker_url", "text", "mode", "stages", "timeout_s", "torch_empty_cache", "model_path", "weight_version"),
    *("segments", "names", "dtypes", "dtype_names", "shapes", "group_name", "master_address", "master_port", "backend"),
    *("world_size", "rank_offset", "action", "disabled", "level", "tags", "method", "args", "kwargs", "init_info"),
    *("update_info", "new_version", "request_ids", "token_ids", "sampling_params", "model", "session_id", "prompt"),
    *("tokens", "is_checkpoint_format", "target", "reset_running_requests", "wait_for_inflight_request", "packed"),
)
VALUES: tuple[Any, ...] = (None, True, -1, 1 << 70, 1.5, "", "\u0000é\ud83d\ude00", [], [[-1]], [None], {}, {"a": [{}]})
BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    *(dict.fromkeys(FIELDS, value) for value in VALUES),
]
PLAUSIBLE = (
    1,
    2,
    "abort",
    "main",
    "a",
    "gloo",
    "checksum",
    "127.0.0.1",
    ["x"],
    ["float32"],
    [[1]],
    [1, 2],
    {"n": 1},
    False,
)
MIXED = 15
"""Bodies of each route that are drawn: some fields of some kind, so that not the first one decides."""

DOCUMENTED = {200, 207, 400, 404, 409, 422, 501, 502, 503}


class _Generation:
    settings = Settings()


@pytest.mark.parametrize("name", ["slime", "omni", "vllm"])
async def test_no_body_finds_a_defect(
    fleet: InProcessFleet, open_gateway: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = {(route.methods, route.path) for route in dialects.load("sglang", _Generation()).routes}  # type: ignore[arg-type]
    routes = dialects.load(name, _Generation()).routes  # type: ignore[arg-type]
    rows = [route for route in routes if (route.methods, route.path) not in own and not route.path.startswith(ENGINE)]
    draw = random.Random(name)
    async with open_gateway(fleet.server.address, name) as http:
        for route in rows:
            path = re.sub(r"\{[^}]*\}+", "nobody", route.path)
            mixed = [
                {field: draw.choice(VALUES + 2 * PLAUSIBLE) for field in FIELDS if draw.random() < 0.4}
                for _ in range(MIXED)
            ]
            for body in [*BODIES, *mixed]:
                given = {"data": body} if isinstance(body, bytes) else {"json": body}
                async with http.request(route.methods.split()[-1], path, **given) as response:
                    told = await response.text()
                    assert response.status in DOCUMENTED, (path, body, told)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        await fleet.until(lambda stages: not any(stage.quarantine.reason for stage in stages))


GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
PARAMETERS = (
    *("max_new_tokens", "max_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed"),
    *("stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "json_schema", "logit_bias", "frequency_penalty"),
)
ASKED = (
    *("text", "input_ids", "prompt", "messages", "token_ids", "model", "rid", "request_id", "stream", "stream_options"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "top_logprobs", "lora_path", "session_id", "echo"),
    *("response_format", "image_data", "priority", "return_token_ids", "output_mode", "best_of", "suffix", "features"),
    *PARAMETERS,
)
TRUE_ENOUGH = ("x", [1, 2], ["x", "y"], [[1], [2]], [{"role": "user", "content": "x"}], 0, 1, 2, 0.5, True, {"n": 2})


async def test_no_body_finds_a_defect_in_what_generates(
    fleet: InProcessFleet, open_gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    draw, seen = random.Random(1), set()

    def some(names: tuple[str, ...], share: float) -> dict[str, Any]:
        return {name: draw.choice(VALUES + 3 * TRUE_ENOUGH) for name in names if draw.random() < share}

    prompts = {"text": "x", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "token_ids": [1]}
    # A body without a limit of tokens has its answer when the time of a request is up.
    async with open_gateway(fleet.server.address, "vllm", timeout_s=10.0) as http:
        for path in GENERATING:
            mixed = [
                {**(prompts if draw.random() < 0.5 else {}), "sampling_params": some(PARAMETERS, 0.2)}
                | some(ASKED, 0.15)
                for _ in range(40)
            ]
            for body in [*BODIES, *mixed, *({**prompts, "sampling_params": value} for value in VALUES)]:
                if isinstance(body, dict):
                    body.setdefault("max_tokens", 2)
                    if isinstance(body.get("sampling_params"), dict):
                        body["sampling_params"] = {"max_new_tokens": 2, "max_tokens": 2} | body["sampling_params"]
                given = {"data": body} if isinstance(body, bytes) else {"json": body}
                async with http.post(path, **given) as response:
                    told = await response.text()
                    seen.add(response.status)
                    assert response.status in DOCUMENTED, (path, body, told)
                    assert "INTERNAL" not in told, (path, body, told)
    assert {200, 400} <= seen
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
