"""What holds in all dialects: repeats under a key are exact; bodies that are too large or too slow change nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rlctl.gateway import bodies, dialects
from rlctl.ports import new_uuid7
from rlctl.testing.fleet import InProcessFleet

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
async def test_a_repeat_under_a_key_is_the_first_call(
    fleet: InProcessFleet, open_gateway: Any, name: str, header: str, own: bool
) -> None:
    key = new_uuid7() if own else "step-1/pause"
    told = []
    async with open_gateway(fleet.server.address, name) as http:
        for _ in range(2):
            async with http.post(PAUSES[name], json={}, headers={header: key}) as response:
                told.append((response.status, await response.json()))
            async with http.post(
                PAUSES[name].replace("pause_generation", "continue_generation").replace("pause", "resume"), json={}
            ):
                pass
    assert told[0] == told[1]
    assert told[0][0] == 200
    pauses = fleet.server.coordinator.operations.newest_first("PauseGeneration", 0)
    assert len(pauses) == 1, "the second call paused nobody"
    assert not any(stage.report.paused for stage in fleet.server.coordinator.roster.fleet().stages)


@EACH
async def test_another_body_under_a_key_is_refused(fleet: InProcessFleet, open_gateway: Any, name: str) -> None:
    other: Any = {"params": {"mode": "wait"}} if name == "vllm" else {"json": {"mode": "retract"}}
    async with open_gateway(fleet.server.address, name) as http:
        for given, good in (({"json": {}}, True), (other, False)):
            async with http.post(PAUSES[name], headers={"Idempotency-Key": "one"}, **given) as response:
                assert (response.status < 300) == good, await response.text()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    load: Callable[..., Any] = dialects.load
    monkeypatch.setattr(dialects, "load", lambda *args: dataclasses.replace(load(*args), body_bytes=1000))
    monkeypatch.setattr(bodies, "READ_S", 0.1)


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
