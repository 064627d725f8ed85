"""A real SGLang of two ranks beside the training: memory that it gives back, and trainers on its device.

On a CPU the memory saver keeps the books only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from colocated import assert_updates
from digests import holds
from models import changed
from sglang_suite import (  # noqa: F401 - tests of the suite
    Server,
    test_a_co_located_step,
    test_memory,
    test_memory_that_is_resumed_without_a_release,
)

from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture
async def server(two_ranks: LaunchedFleet, pair: Fleet, tiny: tuple[Any, Path]) -> AsyncIterator[Server]:
    gateway = GatewayServer(GatewayConfig(two_ranks.address, dialect="sglang"))
    try:
        await gateway.start()
        base = f"http://{gateway.address}"
        async with Server.at([f"{base}/engines/pair"], [2], tiny, root=base) as server:
            yield server
    finally:
        await gateway.stop()


@pytest.mark.parametrize("path", ["ipc", "broadcast"])
def test_a_publisher_updates_weights_that_came_back(pair: Fleet, tiny: tuple[Any, Path], path: str) -> None:
    """Everything is given back for the training; the weights come back for the update, the KV cache after it."""
    model = changed(tiny[0], seed=90, scale=0.3)
    with pair.publisher("actor", path=path) as publisher:
        pair.pause_generation("retract")
        pair.release_memory()
        (stage,) = pair.status().stages
        assert stage.state == common.STAGE_STATE_ASLEEP
        pair.resume_memory(tags=["weights"])
        publisher.update(model, version=f"asleep-{path}")
        assert not pair.status().stages[0].routable, "the KV cache is not back"
        pair.resume_memory()
        pair.continue_generation()
        held = {rank.check.model_digest for stage in pair.check_weights().stage_results for rank in stage.rank_results}
        assert holds(held, model)
        assert pair.generate("1+2=", max_new_tokens=4)


def test_memory_is_released_and_resumed_at_every_rank(pair: Fleet, ordered: Path) -> None:
    """SGLang answers once rank 0 has released or resumed it."""
    done = ordered.with_name("memory")
    ordered.write_text("late-memory:@1")
    for act in (pair.release_memory, pair.resume_memory):
        act(tags=["kv_cache"])
        assert done.exists(), act
        done.unlink()


@pytest.mark.parametrize("trainer", ["slime", "miles"])
async def test_the_ranks_have_a_co_located_trainers_weights(
    two_ranks: LaunchedFleet, tiny: tuple[Any, Path], tmp_path: Path, trainer: str
) -> None:
    """rlctl's code in the ranks reads the handles of the trainer."""
    await assert_updates(two_ranks.address, tiny[1], tmp_path, trainer)
