"""Co-located trainers in front of one real server of one rank: rlctl's code in its rank reads their handles.

A module takes these tests in (``from colocated_suite import *``) and says by its fixture ``engine`` which server it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from colocated import assert_updates

from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet

__all__ = ["fleet", "test_the_ranks_have_the_trainers_weights"]


@pytest.fixture(scope="module")
def fleet(engine: str, tiny: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedFleet]:
    """One server of one rank, at the checkpoint."""
    engines = [EngineSpec("actor-0", str(tiny[1]), engine=engine)]
    with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.mark.parametrize("trainer", ["slime", "miles"])
async def test_the_ranks_have_the_trainers_weights(
    fleet: LaunchedFleet, tiny: tuple[Any, Path], tmp_path: Path, trainer: str
) -> None:
    await assert_updates(fleet, tiny[1], tmp_path, trainer)
