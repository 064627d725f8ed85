"""The count of /abort_requests is that of vLLM 0.32.0 (``vllm/entrypoints/rl/online/api_router.py``)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm_server import ask
from waiting import eventually

from rlctl.testing.in_process_fleet import InProcessFleet


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
    engines = [stage._engine for stage in fleet.stages.values()]
    generation = {"token_ids": [1], "request_id": "here", "sampling_params": {"max_tokens": 1_000_000}}
    async with open_gateway(fleet.server.address, "vllm") as http:
        running = asyncio.create_task(ask(http, "/inference/v1/generate", generation))
        await eventually(lambda: any(engine._running for engine in engines))  # type: ignore[attr-defined]
        assert await ask(http, "/abort_requests", body) == (200, {"status": "aborted", "aborted": aborted})
        status, answer = await running
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
        assert await ask(http, "/abort_requests", {}) == (200, {"status": "aborted", "aborted": 0})
