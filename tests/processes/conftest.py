"""Fleets of real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.launch.local import EngineSpec, LocalFleet


@pytest.fixture
def fake_fleet(tmp_path: Path, checkpoint: Callable[[str], str]) -> Iterator[LocalFleet]:
    """Two processes with fake engines and a coordinator."""
    engines = [EngineSpec(slot, checkpoint("one"), engine="fake") for slot in ("a", "b")]
    with LocalFleet(engines, directory=tmp_path / "fleet") as fleet:
        yield fleet


@pytest.fixture(scope="module")
def torch_fleet(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[LocalFleet]:
    """An engine with two ranks and one with a single rank, on the torch engine; tests' directories may be loaded."""
    options = {"allowed_roots": str(tmp_path_factory.getbasetemp())}
    engines = [
        EngineSpec("actor-0", str(tiny[1]), tp_size=2, options=options),
        EngineSpec("actor-1", str(tiny[1]), options=options),
    ]
    with LocalFleet(engines, directory=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet
