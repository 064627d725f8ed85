"""Gateways in front of in-process fleets, asked over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import torch

from rlctl.demo import tiny
from rlctl.gateway.backend.service import Settings
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.testing.in_process_fleet import InProcessFleet

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a model whose tokenizer, of single characters, has a chat template."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    tiny.save(tiny.make(3), path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return str(path)


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
        metrics: str = "",
        **settings: Any,
    ) -> AsyncIterator[tuple[GatewayServer, aiohttp.ClientSession]]:
        config = GatewayConfig(
            fleet.server.address,
            dialect=dialect,
            token=token if token is not None else fleet.token,
            access_file=fleet.access_file,
            middleware_paths=middleware_paths,
            generation=Settings(**{"timeout_s": 20.0, **settings}),
            drain_s=drain_s,
            metrics=metrics,
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
