"""A co-located trainer in front of a real SGLang server: its handles are read by rlctl's code in SGLang's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from colocated import assert_updates

from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet(sglang: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedFleet]:
    """One SGLang server of one rank, at the checkpoint."""
    engines = [EngineSpec("actor-0", str(tiny[1]), engine="sglang")]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.mark.parametrize("trainer", ["slime"])
async def test_the_ranks_have_the_trainers_weights(
    fleet: LaunchedFleet, tiny: tuple[Any, Path], tmp_path: Path, trainer: str
) -> None:
    await assert_updates(fleet, tiny[1], tmp_path, trainer)
