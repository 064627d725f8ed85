"""The suite of SGLang's interface against a gateway in front of three real SGLang servers."""

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
def reset(three: LaunchedFleet, tiny: tuple[Any, Path]) -> LaunchedFleet:
    """The servers, at the checkpoint that they were started with."""
    with three.connect() as fleet:
        fleet.update_weights_from_disk(str(tiny[1]), version="reset")
    return three


@pytest.fixture
async def server(reset: LaunchedFleet, tiny: tuple[Any, Path]) -> AsyncIterator[Server]:
    gateway = GatewayServer(GatewayConfig(reset.address, dialect="sglang"))
    try:
        await gateway.start()
        base = f"http://{gateway.address}"
        addresses = [f"{base}/engines/actor-{i}" for i in range(3)]
        settings = {"releases": False, "compares": False, "splits_renames": False}
        async with Server.at(addresses, [1] * 3, tiny, root=base, **settings) as server:
            yield server
    finally:
        await gateway.stop()
