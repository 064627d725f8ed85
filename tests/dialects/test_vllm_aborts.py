"""Answers of /abort_requests as those of vLLM 0.32.0.

``vllm/entrypoints/rl/online/api_router.py``, for the path below ``/inference/v1`` ``scale_out/token_in_token_out``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from vllm_server import ask
from waiting import eventually

from rlctl.testing.in_process_fleet import InProcessFleet


async def begun(fleet: InProcessFleet, http: aiohttp.ClientSession) -> asyncio.Task[Any]:
    """Start a long request with the id "here"; return once an engine runs it."""
    engines = [stage._engine for stage in fleet.stages.values()]
    generation = {"token_ids": [1], "request_id": "here", "sampling_params": {"max_tokens": 1_000_000}}
    running = asyncio.create_task(ask(http, "/inference/v1/generate", generation))
    await eventually(lambda: any(engine._running for engine in engines))  # type: ignore[attr-defined]
    return running


@pytest.mark.parametrize(
    ("body", "aborted"),
    [
        ({"request_ids": ["here", "gone"]}, 2),  # all ids of the body, as in vLLM
        ({"request_ids": ["here"]}, 1),
        ({"request_ids": []}, 1),
        ({}, 1),
    ],
)
async def test_ids_of_the_body_are_counted_else_ended_requests(
    fleet: InProcessFleet, open_gateway: Any, body: dict[str, Any], aborted: int
) -> None:
    async with open_gateway(fleet.server.address, "vllm") as http:
        running = await begun(fleet, http)
        assert await ask(http, "/abort_requests", body) == (200, {"status": "aborted", "aborted": aborted})
        status, answer = await running
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
        assert await ask(http, "/abort_requests", {}) == (200, {"status": "aborted", "aborted": 0})


async def test_the_route_of_token_clients_ends_the_named_requests_only(
    fleet: InProcessFleet, open_gateway: Any
) -> None:
    async with open_gateway(fleet.server.address, "vllm") as http:
        running = await begun(fleet, http)
        for body, status in (({"request_ids": []}, 200), ({"request_ids": ["gone"]}, 200), ({}, 400)):
            async with http.post("/inference/v1/abort_requests", json=body) as response:
                assert response.status == status
        assert not running.done()
        async with http.post("/inference/v1/abort_requests", json={"request_ids": ["here"]}) as response:
            assert (response.status, await response.read()) == (200, b"")
        status, answer = await running
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
