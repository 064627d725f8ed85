"""What holds in all dialects: repeats under a key are exact; bodies that are too large or too slow change nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from waiting import eventually

from rlctl.gateway import dialects
from rlctl.ports import new_uuid7
from rlctl.runtime import http_bodies
from rlctl.testing.in_process_fleet import InProcessFleet

PAUSES = {
    "sglang": "/pause_generation",
    "slime": "/engines/a/pause_generation",
    "omni": "/pause_generation",
    "vllm": "/pause",
}
EACH = pytest.mark.parametrize("name", PAUSES)


@EACH
@pytest.mark.parametrize("header", ["Idempotency-Key", "X-Request-Id"])
@pytest.mark.parametrize("own", [False, True])
async def test_a_repeat_under_a_key_is_the_first_call_at_whichever_gateway(
    fleet: InProcessFleet, open_gateway: Any, name: str, header: str, own: bool
) -> None:
    key = new_uuid7() if own else "step-1/pause"
    told = []

    async def pause(http: aiohttp.ClientSession) -> None:
        async with http.post(PAUSES[name], json={}, headers={header: key}) as response:
            told.append((response.status, (await response.text()).replace(str(http._base_url), "")))
        await go_on(http, name)

    async with open_gateway(fleet.server.address, name) as beside:
        async with open_gateway(fleet.server.address, name) as http:
            await pause(http)
        await pause(beside)
        async with open_gateway(fleet.server.address, name) as again:
            await pause(again)
    assert told[0] == told[1] == told[2]
    assert told[0][0] == 200
    pauses = fleet.server.coordinator.operations.newest_first("PauseGeneration", 0)
    assert len(pauses) == 1, "the second call paused nobody"
    assert not any(stage.report.paused for stage in fleet.server.coordinator.roster.fleet().stages)


@EACH
async def test_probes_are_told_whether_an_engine_lives(fleet: InProcessFleet, open_gateway: Any, name: str) -> None:
    async with open_gateway(fleet.server.address, name) as http:

        async def probed(path: str) -> int:
            async with http.get(path) as response:
                return response.status

        async with http.post(PAUSES[name], json={}) as response:
            assert response.status == 200
        assert [await probed(path) for path in ("/health", "/engines/a/health")] == [200, 200], "paused is healthy"
        for stage in [*fleet.stages]:
            await fleet.stages.pop(stage).stop()
        await eventually(lambda: not fleet.server.coordinator.roster.fleet().stages)
        assert await probed("/health") == 503


async def go_on(http: aiohttp.ClientSession, name: str) -> None:
    path = PAUSES[name].replace("pause_generation", "continue_generation").replace("pause", "resume")
    async with http.post(path, json={}) as response:
        assert response.status == 200, await response.text()


@EACH
async def test_another_body_under_a_key_is_refused(fleet: InProcessFleet, open_gateway: Any, name: str) -> None:
    others: list[Any] = [{"json": {"mode": "retract"}}, {"json": {}, "params": {"clear_cache": "false"}}]
    status = {"vllm": 409, "omni": 422}.get(name, 400)
    for given, wanted in (({"json": {}}, 200), (others[0], status), (others[1], status), ({"json": {}}, 200)):
        async with (
            open_gateway(fleet.server.address, name) as http,
            http.post(PAUSES[name], headers={"Idempotency-Key": "one"}, **given) as response,
        ):
            assert response.status == wanted, await response.text()
            assert wanted == 200 or "key" in (await response.text()).lower()


async def test_a_key_outlives_the_coordinator(fleet: InProcessFleet, open_gateway: Any) -> None:
    for _ in range(2):
        async with (
            open_gateway(fleet.server.address, "sglang") as http,
            http.post("/pause_generation", json={}, headers={"Idempotency-Key": "one"}) as response,
        ):
            assert response.status == 200, await response.text()
            await go_on(http, "sglang")
        address = fleet.server.address
        await fleet.channel.close()
        await fleet.server.stop()
        await fleet.start_coordinator(address)
        await fleet.until(lambda stages: all(stage.routable for stage in stages))
    assert len(fleet.server.coordinator.operations.newest_first("PauseGeneration", 0)) == 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    load: Callable[..., Any] = dialects.load
    monkeypatch.setattr(dialects, "load", lambda *args: dataclasses.replace(load(*args), body_bytes=1000))
    monkeypatch.setattr(http_bodies, "READ_S", 0.1)


@EACH
@pytest.mark.usefixtures("small")
async def test_bodies_that_are_too_large_or_too_slow(fleet: InProcessFleet, open_gateway: Any, name: str) -> None:
    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    async def endlessly() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 100

    async with open_gateway(fleet.server.address, name) as http:
        for body, status in ((b" " * 2000, 413), (endlessly(), 413), (slowly(), 408)):
            async with http.post(PAUSES[name], data=body) as response:
                told = await response.json()
                assert response.status == status, told
                assert "error" in told
                assert response.headers["Content-Length"]
    assert not fleet.server.coordinator.operations.newest_first("PauseGeneration", 0)
