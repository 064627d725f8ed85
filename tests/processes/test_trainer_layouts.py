"""Trainers of several processes: pipeline stages as sources, experts that lie at different ranks, gathers over the
trainer's own groups, ranks that die.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trainers
from digests import holds
from trainer_models import make
from trainers import FSDP, PP_TP

from rlctl.demo import tiny
from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.launch.interface.spec import EngineSpec
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1.results_pb2 import OPERATION_STATE_RUNNING

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

MODEL = "experts"

STOPPED_S = 14.0
"""How long a stopped rank stays so: longer than an update of 4 s may take to fail at the others."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An engine with two ranks and one with a single rank."""
    directory = tmp_path_factory.mktemp("experts")
    checkpoint = directory / "checkpoint"
    tiny.save(make(MODEL, 0), checkpoint)
    engines = [EngineSpec("actor-0", str(checkpoint), tp_size=2), EngineSpec("actor-1", str(checkpoint))]
    with LaunchedFleet(engines, directory=directory / "fleet") as local, local.connect() as fleet:
        yield fleet


def train(fleet: Fleet, directory: Path, **settings: Any) -> list[Any]:
    return trainers.train(fleet, directory, model=MODEL, **settings)


def are_of(digests: Iterable[str], seed: int) -> bool:
    return holds(digests, make(MODEL, seed))


def test_every_source_shares_memory_with_every_engine(fleet: Fleet, tmp_path: Path) -> None:
    said = train(fleet, tmp_path, seeds=[71, 72], path="ipc", **PP_TP)
    for update, seed in enumerate([71, 72]):
        assert are_of({rank[update]["digest"] for rank in said}, seed)
    assert {rank for rank, updates in enumerate(said) if updates[-1]["sent"]} == {0, 2}


@pytest.mark.parametrize("layout", [PP_TP, FSDP], ids=["pp2-tp2", "fsdp2"])
def test_every_source_of_a_distributed_trainer_updates_every_engine(
    fleet: Fleet, tmp_path: Path, layout: dict[str, Any]
) -> None:
    before = len([o for o in fleet.operations(page_size=500) if o.verb == "InitWeightsUpdateGroup"])
    seeds = [51, 52, 53, 54]
    said = train(fleet, tmp_path, seeds=seeds, deltas=[54], **layout)
    for update, seed in enumerate(seeds):
        digests = {rank[update]["digest"] for rank in said}
        assert are_of(digests, seed)
    assert {rank for rank, updates in enumerate(said) if updates[-1]["sent"]} == set(layout["sources"])
    held = {r.check.model_digest for stage in fleet.check_weights().stage_results for r in stage.rank_results}
    assert held == digests
    made = [o for o in fleet.operations(page_size=500) if o.verb == "InitWeightsUpdateGroup"]
    assert len(made) - before == len(layout["sources"]), "groups are kept from update to update"
    assert all(stage.routable for stage in fleet.status().stages)


@pytest.mark.parametrize(("layout", "dies"), [(PP_TP, 3), (FSDP, 1)], ids=["pp2-tp2", "fsdp2"])
def test_a_trainer_rank_that_is_killed_fails_the_update_on_all(
    fleet: Fleet, tmp_path: Path, layout: dict[str, Any], dies: int
) -> None:
    seeds = [57 + dies, 67 + dies]
    assert dies not in layout["sources"]
    check_lost(train(fleet, tmp_path, seeds=seeds, dies=dies, deadline_s=30.0, **layout), dies=dies)
    status = fleet.status()
    assert not status.models[0].update_id
    assert status.models[0].latest.label == f"seed-{seeds[0]}", "nothing of the failed update is served"
    # A trainer that is started anew gets groups of its own; no engine is restarted.
    again = train(fleet, (tmp_path / "again").mkdir() or tmp_path / "again", seeds=[63], **PP_TP)  # type: ignore[func-returns-value]
    assert are_of({updates[0]["digest"] for updates in again}, 63)
    assert all(stage.routable for stage in fleet.status().stages)
    assert {stage.incarnation for stage in fleet.status().stages} == {1}


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("stage", [0, 1], ids=["lead", "source"])
def test_a_source_that_fails_is_what_all_are_told_and_no_engine_is_to_blame(
    fleet: Fleet, tmp_path: Path, stage: int, retries: int
) -> None:
    fails = [2 * stage, 2 * stage + 1]
    said = train(
        fleet, tmp_path, seeds=[58, 68 + 2 * stage + retries], fails=fails, options={"retries": retries}, **PP_TP
    )
    for rank, (_, failed) in enumerate(said):
        assert failed["reason"] == ("untyped" if rank in fails else "SOURCE_FAILED"), failed
        assert "the gather is wrong" in failed["message"], failed
        assert rank or not stage or "trainer rank" in failed["message"]
    (ended, *_) = fleet.operations(verb="WeightUpdate")
    assert "the gather is wrong" in ended.error.message
    publisher = fleet.publisher("actor")
    publisher.update(make(MODEL, 59), version=f"after-{stage}-{retries}", deadline_s=60)
    publisher.close()
    assert all(stage.routable for stage in fleet.status().stages)


@pytest.mark.parametrize(
    ("dies", "path"), [(0, "broadcast"), (2, "broadcast"), (2, "ipc")], ids=["lead", "source", "sharing-source"]
)
def test_the_next_trainer_helps_engines_whose_trainer_was_killed(
    fleet: Fleet, tmp_path: Path, dies: int, path: str
) -> None:
    said = train(fleet, tmp_path, seeds=[64, 65], dies=dies, deadline_s=30.0, lease_s=6.0, path=path, **PP_TP)
    check_lost(said, dies=dies)
    # With the lead gone nobody aborts the update, and its lease runs out.
    updates = iter(lambda: fleet.operations(verb="WeightUpdate")[0], None)
    ended = next(update for update in updates if update.state != OPERATION_STATE_RUNNING)
    assert ended.error.reason in (
        ("LEASE_EXPIRED",) if dies == 0 else ("TRAINER_RANK_LOST", "CANCELLED", "GROUP_FAILED")
    )
    assert not fleet.status().models[0].update_id
    assert fleet.status().models[0].latest.label == "seed-64"
    for stage in fleet.status().stages:
        assert stage.routable == (stage.state == common.STAGE_STATE_READY), "DIRTY, or as it was"
    publisher = fleet.publisher("actor")
    model = make(MODEL, 66)
    publisher.update(model, version=f"helped-{dies}-{path}", deadline_s=60)
    publisher.close()
    held = {r.check.model_digest for stage in fleet.check_weights().stage_results for r in stage.rank_results}
    assert holds(held, model)
    assert all(stage.routable for stage in fleet.status().stages)


@pytest.mark.parametrize("stops", [pytest.param(0, id="lead"), pytest.param(2, id="source", marks=pytest.mark.long)])
def test_a_trainer_rank_that_is_stopped_costs_the_others_the_deadline(fleet: Fleet, tmp_path: Path, stops: int) -> None:
    said = train(fleet, tmp_path, seeds=[67, 68], stops=stops, stops_s=STOPPED_S, deadline_s=4.0, lease_s=3.0, **PP_TP)
    for rank, updates in enumerate(said):
        assert are_of([updates[0]["digest"]], 67)
        assert updates[-1]["reason"], "an error of rlctl's, or of the trainer's own gathers"
        if rank != stops:
            assert updates[-1]["elapsed_s"] < STOPPED_S
    (ended, *_) = fleet.operations(verb="WeightUpdate")
    assert ended.error.reason in (("LEASE_EXPIRED",) if stops == 0 else ("CANCELLED", "DEADLINE_EXCEEDED"))
    assert fleet.status().models[0].latest.label == "seed-67"
    publisher = fleet.publisher("actor")
    model = make(MODEL, 69)
    publisher.update(model, version=f"helped-{stops}", deadline_s=60)
    publisher.close()
    held = {r.check.model_digest for stage in fleet.check_weights().stage_results for r in stage.rank_results}
    assert holds(held, model)
    assert [(stage.routable, stage.incarnation) for stage in fleet.status().stages] == [(True, 1)] * 2


def check_lost(said: list[Any], *, dies: int) -> None:
    """Every rank but the one that died made the first update and raised in the second, long before its deadline."""
    assert [len(updates) for updates in said] == [1 if rank == dies else 2 for rank in range(len(said))]
    for rank, updates in enumerate(said):
        if rank != dies:
            assert updates[-1]["reason"] == "TRAINER_RANK_LOST", updates[-1]
            assert updates[-1]["elapsed_s"] < 15


@pytest.mark.parametrize(
    ("layout", "diverges"),
    [(PP_TP, 3), (FSDP, 1), ({**FSDP, "gathers": True}, 1)],
    ids=["pp2-tp2", "fsdp2", "fsdp2-gathered"],
)
def test_a_value_that_is_not_finite_on_any_rank_is_refused_before_anything_is_paused(
    fleet: Fleet, tmp_path: Path, layout: dict[str, Any], diverges: int
) -> None:
    """Also on a rank that is no source: what it holds is sent by another."""
    assert diverges not in layout["sources"]
    said = train(fleet, tmp_path, seeds=[58, 59], diverges=diverges, **layout)
    for first, second in said:
        assert first["digest"]
        assert second["reason"] == "WEIGHTS_NOT_FINITE", second
        assert "1 of " in second["message"]
    update = next(o for o in fleet.operations() if o.verb == "WeightUpdate")
    assert not update.HasField("pause_time")
    assert all(stage.routable for stage in fleet.status().stages)
    assert {model.latest.label for model in fleet.status().models} == {"seed-58"}
