"""A fleet of torch engines of different TP behind gateways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_suite import Server

from rlctl.demo import tiny as tiny_
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.launch.local import EngineSpec, LocalFleet


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The demo's model and the checkpoint that it was saved to."""
    model = tiny_.make(seed=3)
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    tiny_.save(model, directory)
    return model, directory


@pytest.fixture(scope="module")
def torch_fleet(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[LocalFleet]:
    """An engine with two ranks and one with a single rank; tests' directories may be loaded."""
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    engines = [
        EngineSpec("actor-0", str(tiny[1]), tp_size=2, options=options),
        EngineSpec("actor-1", str(tiny[1]), options=options),
    ]
    with LocalFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
async def server(torch_fleet: LocalFleet, tiny: tuple[Any, Path]) -> AsyncIterator[Server]:
    """The fleet as a client of SGLang's sees it: two engines at addresses of their own."""
    gateway = GatewayServer(GatewayConfig(torch_fleet.address, dialect="sglang"))
    try:
        await gateway.start()
        base = f"http://{gateway.address}"
        async with Server.at([f"{base}/engines/actor-{i}" for i in range(2)], [2, 1], tiny, root=base) as server:
            yield server
    finally:
        await gateway.stop()
