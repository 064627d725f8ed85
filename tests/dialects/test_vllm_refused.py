"""What is refused on the way leaves nothing paused that was paused for it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from google.protobuf.message import Message

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.sdk.aio import AsyncFleet
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1.common_pb2 import STAGE_STATE_READY
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.verbs_pb2 import FlushCacheRequest

RESET = "/reset_prefix_cache?reset_running_requests=true"


async def paused(http: aiohttp.ClientSession) -> list[bool]:
    async with http.get("/is_paused") as response:
        return [each["body"]["is_paused"] for each in (await response.json()).values()]


@pytest.mark.parametrize("at", ["", "/engines/a"])
@pytest.mark.parametrize(
    ("method", "path"), [("flush_cache", RESET), ("flush_cache", "/pause"), ("release_memory", "/sleep?level=1")]
)
async def test_what_nobody_can_do_pauses_nobody(
    make_fleet: Callable[..., Any],
    open_gateway: Any,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    at: str,
) -> None:
    monkeypatch.delattr(FakeEngine, method)
    async with make_fleet(a=1, b=2) as fleet, open_gateway(fleet.server.address, "vllm") as http:
        async with http.post(at + path) as response:
            assert (response.status, (await response.json())["error"]["reason"]) == (501, "UNSUPPORTED_BY_ALL")
        assert await paused(http) == [False, False]


@pytest.mark.parametrize("at", ["", "/engines/a"])
async def test_level_1_is_refused_where_no_engine_keeps_its_weights(
    fleet: InProcessFleet, open_gateway: Any, at: str
) -> None:
    for slot in fleet.server.coordinator.roster.slots.values():
        slot.capabilities.keeps_weights = False
    async with open_gateway(fleet.server.address, "vllm") as http:
        async with http.post(f"{at}/sleep?level=1") as response:
            error = (await response.json())["error"]
            assert (response.status, error["reason"], error["field"]) == (501, "UNSUPPORTED_BY_ALL", "keep_weights")
        assert await paused(http) == [False, False]
        async with http.post(f"{at}/sleep?level=1&tags=kv_cache") as response:
            assert response.status == 200


async def test_level_2_leaves_the_weights_stale(fleet: InProcessFleet, open_gateway: Any) -> None:
    async with open_gateway(fleet.server.address, "vllm") as http:
        for path in ("/sleep?level=2", "/wake_up"):
            async with http.post(path) as response:
                assert response.status == 200
        async with http.post("/resume") as response:
            told = await response.json()
    assert all("WEIGHTS_STALE" in answer["error"] for answer in told.values()), told


async def test_a_reset_that_is_refused_after_its_pause_lets_them_go_on(
    fleet: InProcessFleet, open_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = AsyncFleet.call

    async def refusing(self: AsyncFleet, request: Message, **how: Any) -> Operation:
        if isinstance(request, FlushCacheRequest) and not how.get("validate_only"):
            raise Reason.UPDATE_IN_PROGRESS.error("somebody has begun one")
        return await call(self, request, **how)

    monkeypatch.setattr(AsyncFleet, "call", refusing)
    async with open_gateway(fleet.server.address, "vllm") as http:
        async with http.post(RESET) as response:
            assert (response.status, (await response.json())["error"]["reason"]) == (409, "UPDATE_IN_PROGRESS")
        assert await paused(http) == [False, False]


async def test_a_stage_that_loses_a_rank_as_it_wakes_up_leaves_the_others_generating(
    make_fleet: Callable[..., Any], open_gateway: Any
) -> None:
    async with make_fleet(a=1, b=2) as fleet, open_gateway(fleet.server.address, "vllm") as http:
        follower = fleet.workers.pop(("b", 1))
        lost: list[asyncio.Task[None]] = []

        async def lose_rank_1() -> None:
            await asyncio.sleep(0.5)  # its answer has arrived
            await follower.stop()

        async def lose(engine: FakeEngine, method: str, call: Call) -> None:
            if method == "resume_memory" and engine.config.tp_size == 2:
                engine._delay = 1.5
                lost.append(asyncio.create_task(lose_rank_1()))

        async with http.post("/sleep?level=1") as response:
            assert response.status == 200
        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = lose
        async with http.post("/wake_up") as response:
            assert response.status == 207
        await asyncio.gather(*lost)
        assert len(lost) == 1
        assert fleet.stage("a").state == STAGE_STATE_READY
