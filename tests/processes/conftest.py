"""Fleets of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet


@pytest.fixture
def fake_fleet(tmp_path: Path, checkpoint: Callable[[str], str]) -> Iterator[LaunchedFleet]:
    """Two processes with fake engines and a coordinator."""
    engines = [EngineSpec(slot, checkpoint("one"), engine="fake") for slot in ("a", "b")]
    with LaunchedFleet(engines, directory=tmp_path / "fleet") as fleet:
        yield fleet
