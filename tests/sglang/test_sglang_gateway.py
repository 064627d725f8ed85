"""The suite of SGLang's interface against a gateway in front of two real SGLang servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sglang_suite import *  # noqa: F403 - the tests themselves
from sglang_suite import Server

from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.launch.fleet_controller import LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def reset(two: LaunchedFleet, tiny: tuple[Any, Path]) -> LaunchedFleet:
    """The servers, at the checkpoint that they were started with."""
    with two.connect() as fleet:
        fleet.update_weights_from_disk(str(tiny[1]), version="reset")
    return two


@pytest.fixture
async def server(reset: LaunchedFleet, tiny: tuple[Any, Path]) -> AsyncIterator[Server]:
    gateway = GatewayServer(GatewayConfig(reset.address, dialect="sglang"))
    try:
        await gateway.start()
        base = f"http://{gateway.address}"
        addresses = [f"{base}/engines/actor-{i}" for i in range(2)]
        settings = {"releases": False, "compares": False, "splits_renames": False}
        async with Server.at(addresses, [1] * 2, tiny, root=base, **settings) as server:
            yield server
    finally:
        await gateway.stop()
