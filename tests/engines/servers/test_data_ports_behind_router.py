"""sglang-router in front of data ports: their health routes say where it routes."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from passed_answers import Pieces, once
from passing_suite import Gate

from rlctl.engine import HttpExchange, HttpRequest, HttpRoute
from rlctl.ports import SystemClock
from rlctl.runtime.http_forwarding import SLOT
from rlctl.stage.data_port.server import DataPort
from rlctl.v1.common_pb2 import STAGE_STATE_PAUSED, STAGE_STATE_READY

SLOTS = ("a", "b")
CHECKS = ("--health-check-interval-secs=1", "--health-failure-threshold=1", "--health-success-threshold=1")
BODY = {"text": "1", "sampling_params": {"max_new_tokens": 1}}


class Engine:
    async def exchange(self, request: HttpRequest) -> HttpExchange:
        del request
        return Pieces("application/json", once(b"{}"))


class Behind:
    """Two data ports, and an sglang-router that was started with their addresses."""

    def __init__(self) -> None:
        self.gates = {slot: Gate("step", 7) for slot in SLOTS}
        for slot, gate in self.gates.items():
            gate.put(slot=slot)
        self.ports: dict[str, str] = {}
        self.url = ""
        self.http = aiohttp.ClientSession()

    async def start_ports(self, stack: AsyncExitStack) -> None:
        for slot, gate in self.gates.items():
            engine: Any = Engine()
            port = DataPort(lambda engine=engine: engine, lambda gate=gate: gate.serving, SystemClock())
            self.ports[slot] = f"http://{await port.start('127.0.0.1:0', [HttpRoute('POST', '/generate')])}"
            stack.push_async_callback(port.stop)

    async def routed(self) -> set[str]:
        """Return the slots that the router takes for healthy."""
        try:
            async with self.http.get(f"{self.url}/workers") as response:
                listed = (await response.json())["workers"]
        except aiohttp.ClientConnectionError:
            return set()
        healthy = {worker["url"] for worker in listed if worker["is_healthy"]}
        return {slot for slot, url in self.ports.items() if url in healthy}

    async def until_routed(self, *slots: str) -> None:
        async with asyncio.timeout(60):
            while await self.routed() != set(slots):  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)

    async def answering(self) -> list[str]:
        """Return the slots that answer four requests."""
        slots = []
        for _ in range(4):
            async with self.http.post(f"{self.url}/generate", json=BODY) as response:
                assert response.status == 200, await response.text()
                slots.append(response.headers[SLOT])
        return slots


@pytest.fixture
async def behind(tmp_path: Path) -> AsyncIterator[Behind]:
    behind = Behind()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    behind.url = f"http://127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(behind.http.close)
        await behind.start_ports(stack)
        log = stack.enter_context((tmp_path / "router.log").open("wb"))
        router = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "sglang-router"),
            *("launch", "--host=127.0.0.1", f"--port={port}", "--policy=round_robin", *CHECKS),
            *("--worker-urls", *behind.ports.values()),
            stdout=log,
            stderr=log,
        )
        try:
            await behind.until_routed(*SLOTS)
            yield behind
        finally:
            router.terminate()
            await router.wait()


async def test_the_router_leaves_a_stage_that_does_not_serve_and_returns_to_it(behind: Behind) -> None:
    assert sorted(await behind.answering()) == ["a", "a", "b", "b"]
    behind.gates["a"].put(state=STAGE_STATE_PAUSED)
    await behind.until_routed("b")
    assert await behind.answering() == ["b"] * 4
    behind.gates["a"].put(state=STAGE_STATE_READY)
    await behind.until_routed(*SLOTS)
    assert sorted(await behind.answering()) == ["a", "a", "b", "b"]
    behind.gates["b"].put(lease_until=0.0)
    await behind.until_routed("a")
    assert await behind.answering() == ["a"] * 4
