"""An engine that comes back with old weights gets those that no disk has from another of the same layout."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from digests import holds
from models import changed
from test_torch_fleet import all_generate_like, digests
from up_helpers import restarted

from rlctl.demo.tiny import save
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


@pytest.fixture
def two(tmp_path: Path, tiny: tuple[Any, Path]) -> Iterator[LaunchedFleet]:
    """Both of two ranks, with a checkpoint of their own."""
    engines = [EngineSpec(slot, str(shutil.copytree(tiny[1], tmp_path / slot)), tp_size=2) for slot in ("a", "b")]
    with LaunchedFleet(engines, directory=tmp_path / "fleet") as fleet:
        yield fleet


def test_every_rank_gets_its_own_part_from_the_same_rank_of_another_engine(
    two: LaunchedFleet, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    with two.connect() as fleet:
        layouts = [stage.registration.layout.shards_sha256 for stage in fleet.status().stages]
        assert layouts[0] == layouts[1]
        model = changed(tiny[0], seed=1)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        with fleet.publisher("actor") as publisher:
            publisher.update(model, version="one")
        for slot in ("b", "a"):
            restarted(two, fleet, slot)
            (heal,) = (each for each in fleet.operations(verb="HealStage") if slot in each.targets)
            (healed,) = heal.stage_results
            received = [rank.weights.bytes_received for rank in healed.rank_results]
            # In full tensors each of them would have got all of it. Norms and embeddings are whole at each rank.
            assert whole < sum(received) < 1.1 * whole
            assert max(received) < 0.6 * whole
            assert holds(digests(fleet), model)
            all_generate_like(fleet, model)
        # An engine that starts with the contents of the version is adopted, though it does not know the version's key.
        model, heals = changed(tiny[0], seed=4), len(fleet.operations(verb="HealStage"))
        with fleet.publisher("actor") as publisher:
            result = publisher.update(model, version="two", digest="keyed")
        save(model, tmp_path / "b")
        two.process("b").kill()
        stages = restarted(two, fleet, "b")
        assert {stage.report.model_digest for stage in stages.values()} == {result.model_digest}
        assert len(fleet.operations(verb="HealStage")) == heals
        all_generate_like(fleet, model)


@pytest.mark.parametrize("becomes", ["overwritten", "removed"])
def test_a_version_whose_checkpoint_is_no_longer_there_comes_from_another_engine(
    two: LaunchedFleet, tiny: tuple[Any, Path], tmp_path: Path, becomes: str
) -> None:
    """What a trainer does that saves every step under one name."""
    latest = tmp_path / "latest"
    model = changed(tiny[0], seed=2)
    save(model, latest)
    with two.connect() as fleet:
        with fleet.publisher("actor") as publisher:
            publisher.update(model, version="one", checkpoint=str(latest))
        shutil.rmtree(latest)
        if becomes == "overwritten":
            save(changed(tiny[0], seed=3), latest)
        restarted(two, fleet, "a")
        assert holds(digests(fleet), model)
        healed, failed = (each for each in fleet.operations(verb="HealStage") if "a" in each.targets)
        assert (healed.error.reason, bool(failed.error.reason)) == ("", True)
