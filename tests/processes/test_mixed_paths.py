"""One update for engines that share the trainer's memory and for one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from digests import holds
from elsewhere import OWN_SHARED_MEMORY, need, serving

from rlctl.demo import tiny as demo_tiny
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


@pytest.fixture
def mixed(tmp_path: Path, tiny: tuple[Any, Path]) -> Iterator[Fleet]:
    """Engine "near" of two ranks, and engine "far", whose /dev/shm is another one."""
    need(*OWN_SHARED_MEMORY, "true")
    engines = [EngineSpec("near", str(tiny[1]), tp_size=2)]
    with LaunchedFleet(engines, directory=tmp_path / "fleet") as local, local.connect() as fleet:
        fleet.admit(["far"])
        arguments = ("--slot", "far", "--model-path", str(tiny[1]), "--coordinator", local.address)
        with serving(OWN_SHARED_MEMORY, "stage", *arguments, log=tmp_path / "far.log"):
            with closing(fleet.watch()) as events:
                next(e for e in events if [stage.routable for stage in fleet.status().stages] == [True, True])
            yield fleet


def test_some_by_shared_memory_and_some_by_broadcast_in_one_commit(mixed: Fleet) -> None:
    hosts = {
        stage.registration.slot: {worker.host_id for worker in stage.registration.layout.workers}
        for stage in mixed.status().stages
    }
    assert hosts["near"].isdisjoint(hosts["far"])
    publisher = mixed.publisher("actor", path="auto")
    for number in range(3):
        model = demo_tiny.make(seed=80 + number)
        result = publisher.update(model, version=f"mixed-{number}")
        assert result.version.sequence == 2 + number
        assert holds([result.model_digest], model)
        assert {stage.verified for stage in result.operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
        stages = mixed.status().stages
        assert {stage.report.weight_version.label for stage in stages} == {f"mixed-{number}"}
        assert all(stage.routable for stage in stages)
        checked = mixed.check_weights().stage_results
        assert [{r.check.model_digest for r in stage.rank_results} for stage in checked] == [{result.model_digest}] * 2
    # One group for the one that is far, kept from update to update; everything else through segments.
    (group,) = mixed.operations(verb="InitWeightsUpdateGroup")
    assert list(group.targets) == ["far"]
    written = {
        verb: {tuple(o.targets) for o in mixed.operations(verb=verb)}
        for verb in ("UpdateWeightsFromDistributed", "UpdateWeightsFromTensor")
    }
    assert written == {"UpdateWeightsFromDistributed": {("far",)}, "UpdateWeightsFromTensor": {("near",)}}
    publisher.close()
