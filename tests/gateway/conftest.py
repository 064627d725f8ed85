"""Gateways in front of in-process fleets, asked over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from rlctl.gateway.generation.service import Settings
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.testing.fleet import InProcessFleet


@pytest.fixture
def make_gateway() -> Callable[..., Any]:
    """``async with make_gateway(fleet, policy=..., dialect=...) as (server, http)``; ``http`` has its address."""

    @asynccontextmanager
    async def make(
        fleet: InProcessFleet,
        *,
        dialect: str = "sglang",
        token: str | None = None,
        middleware_paths: tuple[str, ...] = (),
        drain_s: float = 5.0,
        **settings: Any,
    ) -> AsyncIterator[tuple[GatewayServer, aiohttp.ClientSession]]:
        config = GatewayConfig(
            fleet.server.address,
            dialect=dialect,
            token=token if token is not None else fleet.token,
            middleware_paths=middleware_paths,
            generation=Settings(**{"timeout_s": 20.0, **settings}),
            drain_s=drain_s,
        )
        server = GatewayServer(config)
        try:
            await server.start()
            async with aiohttp.ClientSession(f"http://{server.address}") as http:
                yield server, http
        finally:
            await server.stop()

    return make


@pytest.fixture
async def http(fleet: InProcessFleet, make_gateway: Callable[..., Any]) -> AsyncIterator[aiohttp.ClientSession]:
    """A gateway with SGLang's dialect in front of stages a and b."""
    async with make_gateway(fleet) as (_, http):
        yield http
