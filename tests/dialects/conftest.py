"""Gateways of every dialect, over real HTTP, in front of torch engines of different TP in processes of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sglang_suite import Server

from rlctl.gateway.backend.service import Settings
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk import aio
from rlctl.sdk.aio import AsyncFleet

Open = Callable[..., AbstractAsyncContextManager[aiohttp.ClientSession]]


@asynccontextmanager
async def _open(
    address: str, dialect: str, middleware_paths: tuple[str, ...] = (), token: str | None = None, **settings: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    config = GatewayConfig(
        address,
        dialect,
        token=token,
        middleware_paths=middleware_paths,
        generation=Settings(**{"timeout_s": 30.0, **settings}),
        drain_s=5.0,
    )
    server = GatewayServer(config)
    try:
        await server.start()
        async with aiohttp.ClientSession(f"http://{server.address}") as http:
            yield http
    finally:
        await server.stop()


@pytest.fixture
def open_gateway() -> Open:
    """``async with open_gateway(coordinator, "slime") as http``."""
    return _open


@pytest.fixture
async def client(torch_fleet: LaunchedFleet) -> AsyncIterator[AsyncFleet]:
    """The fleet as rlctl sees it, beside the dialect."""
    async with await aio.connect(torch_fleet.address) as client:
        yield client


@pytest.fixture
async def server(torch_fleet: LaunchedFleet, tiny: tuple[Any, Path]) -> AsyncIterator[Server]:
    """The fleet as a client of SGLang's sees it: two engines at addresses of their own."""
    gateway = GatewayServer(GatewayConfig(torch_fleet.address, dialect="sglang"))
    try:
        await gateway.start()
        base = f"http://{gateway.address}"
        engines = [f"{base}/engines/actor-{number}" for number in range(2)]
        async with Server.at(engines, [2, 1], tiny, root=base) as server:
            yield server
    finally:
        await gateway.stop()
