"""The cases of Miles's own tests of router, session server and engine, as requests (radixark/miles 31f1ca96).

``tests/fast/router/test_router.py`` and ``test_sessions.py``, ``miles/backends/sglang_utils/sglang_engine.py``. The
router's list of workers is in ``test_slime.py``, the attach in ``test_attach.py``, an update over a group in
``test_sglang_torch_fleet.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from client_runs import miles_session

from rlctl.launch.fleet_controller import LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture
async def http(
    torch_fleet: LaunchedFleet, open_gateway: Any, tiny: tuple[Any, Path], tmp_path: Path
) -> AsyncIterator[aiohttp.ClientSession]:
    chats = tmp_path / "chats"
    shutil.copytree(tiny[1], chats, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((chats / "tokenizer_config.json").read_text())
    (chats / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    async with open_gateway(torch_fleet.address, "slime", tokenizer=str(chats)) as http:
        yield http


async def ask(http: aiohttp.ClientSession, method: str, path: str, **given: Any) -> tuple[int, Any]:
    async with http.request(method, path, **given) as response:
        text = await response.text()
        return response.status, json.loads(text) if response.content_type == "application/json" else text


async def test_the_turns_of_a_session_build_on_the_tokens_before(http: aiohttp.ClientSession) -> None:
    await miles_session(f"http://{http._base_url.authority}")


async def test_a_session_s_bad_requests_are_answered_as_errors_of_the_caller(http: aiohttp.ClientSession) -> None:
    """The session server passes them on, and records nothing of them."""
    body = {"messages": [{"role": "user", "content": "1"}], "input_ids": [5] * 3000, "max_tokens": 8, "logprobs": True}
    status, told = await ask(http, "POST", "/v1/chat/completions", json={**body, "return_meta_info": True})
    assert (status, told["error"]["reason"]) == (400, "PROMPT_TOO_LONG")
    headers = {"Content-Type": "application/json"}
    assert (await ask(http, "POST", "/v1/chat/completions", data=b"{not json", headers=headers))[0] == 400
    async with http.post("/v1/chat/completions", json={**body, "input_ids": [5]}) as response:
        assert [len(response.headers.getall(name)) for name in ("Server", "Date")] == [1, 1], "aiohttp refuses two"


async def test_the_router_proxies_to_the_engines_addresses(http: aiohttp.ClientSession) -> None:
    """What its proxy and its check of a worker's health send to each of its workers."""
    _, listed = await ask(http, "GET", "/list_workers")
    body = {"input_ids": [1, 2, 3], "return_logprob": True, "sampling_params": {"max_new_tokens": 4}}
    for url in listed["urls"]:
        async with http.get(f"{url}/health") as response:
            assert response.status == 200
        async with http.post(f"{url}/generate", json=body) as response:
            told = await response.json()
        assert response.status == 200
        assert isinstance(told["text"], str)
        assert len(told["meta_info"]["output_token_logprobs"]) == len(told["output_ids"])


async def test_what_an_engine_s_actor_calls_between_the_steps(
    http: aiohttp.ClientSession, tiny: tuple[Any, Path]
) -> None:
    """In the order of a co-located trainer with updates from disk; every answer must be 200."""
    path = str(tiny[1])
    calls = (
        ("GET", "/health_generate", None),
        ("GET", "/server_info", None),
        ("GET", "/model_info", None),
        ("GET", "/flush_cache", None),
        ("POST", "/weights_checker", {"action": "checksum", "allow_quant_error": False, "selector": "all"}),
        ("POST", "/weights_checker", {"action": "snapshot", "allow_quant_error": False, "selector": "all"}),
        ("POST", "/pause_generation", {"mode": "in_place"}),
        ("POST", "/continue_generation", {}),
        ("POST", "/pause_generation", {"mode": "retract"}),
        ("GET", "/flush_cache", None),
        ("POST", "/update_weights_from_disk", {"model_path": path, "weight_version": "7"}),
        ("POST", "/update_weight_version", {"new_version": "8", "abort_all_requests": False}),
        ("POST", "/continue_generation", {}),
        ("POST", "/release_memory_occupation", {"tags": None}),
        ("POST", "/resume_memory_occupation", {"tags": ["weights"]}),
        ("POST", "/update_weights_from_disk", {"model_path": path, "load_format": "auto", "weight_version": "9"}),
        ("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]}),
        ("POST", "/resume_memory_occupation", {"tags": ["cuda_graph"]}),
        ("POST", "/weights_checker", {"action": "compare", "selector": "all", "skip_tensor_list": ["mtp."]}),
        ("POST", "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}),
    )
    for method, route, body in calls:
        status, told = await ask(http, method, route, **({} if body is None else {"json": body}))
        assert status == 200, (route, told)
    _, info = await ask(http, "GET", "/model_info")
    assert info["weight_version"] == "9"
    # What it expects to fail where there is nothing to leave.
    status, _ = await ask(http, "POST", "/destroy_weights_update_group", json={"group_name": "nobody's"})
    assert status == 400
