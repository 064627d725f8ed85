"""The suite of SGLang's interface against a gateway in front of two real SGLang servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_suite import *  # noqa: F403 - the tests themselves
from sglang_suite import Server

from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.launch.fleet import EngineSpec, LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def servers(sglang: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedFleet]:
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    engines = [EngineSpec(f"actor-{i}", str(tiny[1]), engine="sglang", options=options) for i in range(2)]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
async def server(servers: LaunchedFleet, tiny: tuple[Any, Path]) -> AsyncIterator[Server]:
    gateway = GatewayServer(GatewayConfig(servers.address, dialect="sglang"))
    try:
        await gateway.start()
        base = f"http://{gateway.address}"
        addresses = [f"{base}/engines/actor-{i}" for i in range(2)]
        async with Server.at(addresses, [1, 1], tiny, root=base, releases=False) as server:
            yield server
    finally:
        await gateway.stop()
