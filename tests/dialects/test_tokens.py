"""A fleet with a token, behind gateways of each dialect: only who has it changes anything, and health asks for none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rlctl.testing.fleet import InProcessFleet

TOKEN = "a token made for this test"


@pytest.fixture
async def fleet(make_fleet: Callable[..., Any]) -> AsyncIterator[InProcessFleet]:
    async with make_fleet(token=TOKEN, a=1) as fleet:
        yield fleet


@pytest.mark.parametrize(
    ("dialect", "method", "path", "wrong"),
    [
        ("slime", "GET", "/list_workers", 401),
        ("slime", "POST", "/remove_worker?url=http://x/engines/a", 401),
        ("omni", "GET", "/model_info", 403),
        ("omni", "POST", "/pause_generation", 403),
        ("omni", "PUT", "/workers/a", 403),
        ("vllm", "POST", "/pause", 401),
        ("vllm", "POST", "/engines/a/pause", 401),
        ("vllm", "GET", "/servers", 401),
    ],
)
async def test_without_the_token_nothing_is_done(
    fleet: InProcessFleet, open_gateway: Any, dialect: str, method: str, path: str, wrong: int
) -> None:
    body = {"disabled": True} if method == "PUT" else None
    async with open_gateway(fleet.server.address, dialect, token=TOKEN) as http:
        for header, status in (({}, 401), ({"Authorization": "Bearer other"}, wrong)):
            async with http.request(method, path, json=body, headers=header) as response:
                assert response.status == status, await response.text()
                if status == 401:
                    assert response.headers["WWW-Authenticate"] == "Bearer"
        stage = fleet.stage("a")
        assert (stage.enabled, stage.report.paused) == (True, False)
        async with http.request(method, path, json=body, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
            assert response.status == 200, await response.text()


async def test_health_needs_no_token(fleet: InProcessFleet, open_gateway: Any) -> None:
    async with open_gateway(fleet.server.address, "vllm", token=TOKEN) as http:
        for path in ("/health", "/ping", "/engines/a/health"):
            async with http.get(path) as response:
                assert response.status == 200
