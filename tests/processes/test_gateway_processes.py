"""``rlctl gateway`` as processes: one port for several workers, replaced when killed, drained at SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from scraping import scrape
from waiting import eventually

from rlctl.launch.local.child_processes import Process
from rlctl.testing.in_process_fleet import InProcessFleet

pytestmark = pytest.mark.processes

ASK = {"text": "x", "sampling_params": {"max_new_tokens": 3}}


@asynccontextmanager
async def gateway(fleet: InProcessFleet, log: Path, *arguments: str) -> AsyncIterator[tuple[Process, str]]:
    process = Process("gateway", ["gateway", "--coordinator", fleet.server.address, *arguments], log, {})
    try:
        facts = await asyncio.to_thread(process.announced, 60.0)
        yield process, facts["address"]
    finally:
        process.terminate()
        assert not await asyncio.to_thread(process.wait, 20.0), "it had to be killed"


async def ask(url: str, body: Any = ASK) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{url}/generate", json=body) as response:
        return response.status, await response.json()


def free_ports(count: int) -> int:
    """The first of several ports in a row that nobody listens at."""
    for first in random.sample(range(20000, 32000), 100):  # below those that the kernel gives out
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no ports are free")


async def served(port: int) -> float:
    """Samples that a worker has counted, once it listens."""
    while True:
        with contextlib.suppress(OSError):
            return (await scrape(f"127.0.0.1:{port}")).value("rlctl_gateway_samples_total", outcome="ok")
        await asyncio.sleep(0.1)


async def test_workers_share_a_port_and_are_replaced(fleet: InProcessFleet, tmp_path: Path) -> None:
    first = free_ports(2)
    metrics = ("--metrics", f"127.0.0.1:{first}")
    async with gateway(fleet, tmp_path / "log", "--workers", "2", *metrics) as (process, url):
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        replies = await asyncio.gather(*(ask(url) for _ in range(20)))
        assert {(status, tuple(reply["output_ids"])) for status, reply in replies} == {(200, (0, 1, 2))}
        samples = [await served(first), await served(first + 1)]
        assert sum(samples) == 20, "each worker counts its own"
        workers[0].kill()

        def replaced() -> bool:
            now = psutil.Process(process.pid).children()
            return len(now) == 2 and workers[0].pid not in {each.pid for each in now}

        await eventually(replaced, timeout_s=20)
        assert (await ask(url))[0] == 200
        async with asyncio.timeout(20):
            now = [await served(first), await served(first + 1)]
        assert 0 in now or 1 in now, "the replacement serves metrics where its predecessor did, and counts from 0"
    assert process.returncode == 0
    assert not psutil.pid_exists(workers[1].pid)


async def test_workers_end_when_their_parent_is_killed(fleet: InProcessFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path / "log", "--workers", "2") as (process, _):
        workers = psutil.Process(process.pid).children()
        process.kill()
        await eventually(lambda: not any(worker.is_running() for worker in workers), timeout_s=20)


async def test_what_runs_ends_in_order(fleet: InProcessFleet, tmp_path: Path) -> None:
    async with gateway(fleet, tmp_path / "log") as (process, url):
        long = {"text": "x", "sampling_params": {"max_new_tokens": 300}}
        running = asyncio.create_task(ask(url, long))
        engines: list[Any] = [stage._engine for stage in fleet.stages.values()]
        await eventually(lambda: any(engine._running for engine in engines))
        os.kill(process.pid, signal.SIGTERM)
        status, reply = await running
        assert (status, len(reply["output_ids"])) == (200, 300)
        with pytest.raises(aiohttp.ClientError):
            await ask(url)
    assert process.returncode == 0


async def test_what_cannot_start_says_why(fleet: InProcessFleet, tmp_path: Path) -> None:
    log = tmp_path / "log"
    for number, arguments in enumerate((["--listen", "0.0.0.0:0"], ["--listen", "0.0.0.0:0", "--workers", "2"])):
        process = Process("gateway", ["gateway", "--coordinator", fleet.server.address, *arguments], log, {})
        assert not await asyncio.to_thread(process.wait, 30.0), "it had to be killed"
        assert process.returncode not in (0, None)
        assert log.read_text().count("INSECURE_BIND") > number
