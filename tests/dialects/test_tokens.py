"""A fleet with a token, behind gateways of each dialect: only who has it changes anything, and health asks for none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v

TOKEN = "a token made for this test"
OURS = {"authorization": f"Bearer {TOKEN}"}
OTHER = {"authorization": "Bearer other"}


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


@pytest.mark.parametrize(("dialect", "path"), [("sglang", "/abort_request"), ("vllm", "/abort_requests")])
async def test_without_the_token_nobody_ends_a_request_that_runs_at_the_gateway(
    fleet: InProcessFleet, open_gateway: Any, dialect: str, path: str
) -> None:
    """The gateway ends it by itself: no stage is asked, which would look at the token."""
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT), metadata=OURS.items())
    asked = {"text": "x", "sampling_params": {"max_new_tokens": 4}, "rid": "mine"}
    named = {"rid": "mine"} if dialect == "sglang" else {"request_ids": ["mine"]}
    async with open_gateway(fleet.server.address, dialect, token=TOKEN) as http:

        async def ours() -> Any:
            async with http.post("/generate", json=asked, headers=OURS) as response:
                return (await response.json())["meta_info"]["finish_reason"]

        running = asyncio.create_task(ours())
        assert not (await asyncio.wait({running}, timeout=0.5))[0]
        for header in ({}, OTHER):
            async with http.post(path, json=named, headers=header) as response:
                assert response.status == 401, await response.text()
        assert not (await asyncio.wait({running}, timeout=0.5))[0]
        await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(), metadata=OURS.items())
        assert (await running)["type"] == "length"


@pytest.mark.parametrize("header", [{}, OTHER])
async def test_without_the_token_nothing_is_told_or_kept(fleet: InProcessFleet, open_gateway: Any, header: Any) -> None:
    for dialect, path, body in (
        ("sglang", "/get_weight_version", None),
        ("slime", "/retrieve_from_text", {"text": "x"}),
        ("vllm", "/tokenize", {"prompt": "x"}),
        ("vllm", "/detokenize", {"tokens": [1]}),
        ("vllm", "/finish_session", {"session_id": "x"}),
    ):
        paths = ("rlctl.gateway.radix.middleware:RadixMiddleware",) if dialect == "slime" else ()
        async with open_gateway(fleet.server.address, dialect, paths, token=TOKEN) as http:
            method = "GET" if body is None else "POST"
            async with http.request(method, path, json=body, headers=header) as response:
                assert response.status == 401, (path, await response.text())
                said = await response.json()
                assert isinstance(said["error"], str if dialect == "slime" else dict)
                assert dialect != "sglang" or "bearer token" in said["message"]


async def test_without_the_token_nobody_waits_in_the_place_of_others(fleet: InProcessFleet, open_gateway: Any) -> None:
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT), metadata=OURS.items())
    one = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    async with open_gateway(fleet.server.address, "sglang", token=TOKEN) as http:
        refused = await asyncio.wait_for(http.post("/generate", json=one, headers=OTHER), 5)
        assert refused.status == 401


async def test_a_token_guards_a_gateway_whose_fleet_has_none(make_fleet: Callable[..., Any], open_gateway: Any) -> None:
    """It is what lets the gateway bind where others reach it; the fleet binds loopback, and asks nobody."""
    async with make_fleet(a=1) as fleet, open_gateway(fleet.server.address, "sglang", token=TOKEN) as http:
        for header, status in (({}, 401), (OTHER, 401), (OURS, 200)):
            async with http.post("/pause_generation", json={}, headers=header) as response:
                assert response.status == status, await response.text()
            assert fleet.stage("a").report.paused == (status == 200)
        async with http.get("/health") as response:
            assert response.status == 200
