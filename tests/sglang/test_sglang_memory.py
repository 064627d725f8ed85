"""A real SGLang beside the training: memory that it gives back, with its memory saver, and trainers on its device.

On a CPU the memory saver keeps the books only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from colocated import assert_updates
from models import changed
from sglang_suite import (  # noqa: F401 - tests of the suite
    Server,
    test_a_co_located_step,
    test_memory,
    test_memory_that_is_resumed_without_a_release,
)

import rlctl
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.v1 import common_pb2 as common

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def launched(sglang: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedFleet]:
    options = {"enable_memory_saver": "true", "allowed_roots": str(tmp_path_factory.getbasetemp())}
    engines = [EngineSpec("actor-0", str(tiny[1]), engine="sglang", options=options)]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
async def server(launched: LaunchedFleet, tiny: tuple[Any, Path]) -> AsyncIterator[Server]:
    gateway = GatewayServer(GatewayConfig(launched.address, dialect="sglang"))
    try:
        await gateway.start()
        base = f"http://{gateway.address}"
        async with Server.at([f"{base}/engines/actor-0"], [1], tiny, root=base) as server:
            yield server
    finally:
        await gateway.stop()


@pytest.mark.parametrize("path", ["ipc", "broadcast"])
def test_a_publisher_updates_weights_that_came_back(launched: LaunchedFleet, tiny: tuple[Any, Path], path: str) -> None:
    """Everything is given back for the training; the weights come back for the update, the KV cache after it."""
    model = changed(tiny[0], seed=90, scale=0.3)
    with launched.connect() as fleet, fleet.publisher("actor", path=path) as publisher:
        fleet.pause_generation("retract")
        fleet.release_memory()
        (stage,) = fleet.status().stages
        assert stage.state == common.STAGE_STATE_ASLEEP
        fleet.resume_memory(tags=["weights"])
        publisher.update(model, version=f"asleep-{path}")
        assert not fleet.status().stages[0].routable, "the KV cache is not back"
        fleet.resume_memory()
        fleet.continue_generation()
        held = {rank.check.model_digest for stage in fleet.check_weights().stage_results for rank in stage.rank_results}
        assert held == {rlctl.model_digest(model)}
        assert fleet.generate("1+2=", max_new_tokens=4)


@pytest.mark.parametrize("trainer", ["slime", "miles"])
async def test_the_ranks_have_a_co_located_trainers_weights(
    launched: LaunchedFleet, tiny: tuple[Any, Path], tmp_path: Path, trainer: str
) -> None:
    """rlctl's code in the rank reads the handles of the trainer."""
    await assert_updates(launched.address, tiny[1], tmp_path, trainer)
