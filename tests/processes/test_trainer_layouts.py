"""Trainers of several processes: pipeline stages as sources, gathers over the trainer's own groups, ranks that die."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlctl
from rlctl.client.fleet import Fleet
from rlctl.demo import tiny as demo_tiny
from rlctl.launch.local import LocalFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

RANK = Path(__file__).with_name("trainer_rank.py")
PP_TP = {"layout": "pp-tp", "size": 4, "sources": [0, 2]}
FSDP = {"layout": "fsdp", "size": 2, "sources": [0]}


@pytest.fixture(scope="module")
def fleet(torch_fleet: LocalFleet) -> Iterator[Fleet]:
    with torch_fleet.connect() as fleet:
        yield fleet


def train(fleet: Fleet, directory: Path, *, seeds: list[int], deadline_s: float = 60.0, **settings: Any) -> list[Any]:
    """Run a trainer to its end: what each rank said of each update, by rank; a rank that was killed says less."""
    common = settings | {
        "seeds": seeds,
        "deadline_s": deadline_s,
        "address": fleet.aio.connection.address,
        "store": str(directory / "store"),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(common | {"rank": rank})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(settings["size"])
    ]
    said = []
    for rank, process in enumerate(ranks):
        out, errors = process.communicate(timeout=150)
        assert process.returncode == (-9 if rank == settings.get("dies") else 0), errors
        said.append([json.loads(line) for line in out.splitlines()])
    return said


def test_every_source_shares_memory_with_every_engine(fleet: Fleet, tmp_path: Path) -> None:
    said = train(fleet, tmp_path, seeds=[71, 72], path="ipc", **PP_TP)
    for update, seed in enumerate([71, 72]):
        assert {rank[update]["digest"] for rank in said} == {rlctl.model_digest(demo_tiny.make(seed=seed))}
    assert {rank for rank, updates in enumerate(said) if updates[-1]["sent"]} == {0, 2}


@pytest.mark.parametrize("layout", [PP_TP, FSDP], ids=["pp2-tp2", "fsdp2"])
def test_every_source_of_a_distributed_trainer_updates_every_engine(
    fleet: Fleet, tmp_path: Path, layout: dict[str, Any]
) -> None:
    before = len([o for o in fleet.operations(page_size=500) if o.verb == "InitWeightsUpdateGroup"])
    seeds = [51, 52, 53, 54]
    said = train(fleet, tmp_path, seeds=seeds, deltas=[54], **layout)
    for update, seed in enumerate(seeds):
        expected = rlctl.model_digest(demo_tiny.make(seed=seed))
        assert {rank[update]["digest"] for rank in said} == {expected}
    assert {rank for rank, updates in enumerate(said) if updates[-1]["sent"]} == set(layout["sources"])
    held = {r.check.model_digest for stage in fleet.check_weights().stage_results for r in stage.rank_results}
    assert held == {expected}
    made = [o for o in fleet.operations(page_size=500) if o.verb == "InitWeightsUpdateGroup"]
    assert len(made) - before == len(layout["sources"]), "groups are kept from update to update"
    assert all(stage.routable for stage in fleet.status().stages)


def test_a_trainer_rank_that_is_killed_fails_the_update_on_all(fleet: Fleet, tmp_path: Path) -> None:
    said = train(fleet, tmp_path, seeds=[61, 62], dies=3, deadline_s=30.0, **PP_TP)
    assert [len(updates) for updates in said] == [2, 2, 2, 1]
    for rank in range(3):
        last = said[rank][-1]
        assert "reason" in last, last
        assert last["elapsed_s"] < 15
    assert said[0][-1]["reason"] in ("TRAINER_RANK_LOST", "SOURCE_FAILED")
    status = fleet.status()
    assert not status.models[0].update_id
    assert status.models[0].latest.label == "seed-61", "nothing of the failed update is served"
    # A trainer that is started anew gets groups of its own; no engine is restarted.
    again = train(fleet, (tmp_path / "again").mkdir() or tmp_path / "again", seeds=[63], **PP_TP)  # type: ignore[func-returns-value]
    assert {updates[0]["digest"] for updates in again} == {rlctl.model_digest(demo_tiny.make(seed=63))}
    assert all(stage.routable for stage in fleet.status().stages)
