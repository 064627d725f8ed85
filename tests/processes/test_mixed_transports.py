"""One update for engines that join NCCL groups and for engines that join gloo's: groups apart, one pass, one commit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from digests import holds
from interrupted_weights import Interrupted
from test_attempts_processes import held
from trainers import PP_TP, train
from with_nccl import stand_in_at_a_source

from rlctl.demo import tiny as demo_tiny
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.trainer import source_rank
from rlctl.v1 import common_pb2 as common
from rlctl.v1.results_pb2 import OPERATION_STATE_PARTIAL

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

BOTH = ["nccl", "gloo"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[LaunchedFleet]:
    """Engines "a" (of two ranks) and "c" offer NCCL, for which gloo stands in (with_nccl.py), and "b" does not."""
    offers = {"WITH_NCCL": "1"}
    engines = [
        EngineSpec("a", str(tiny[1]), tp_size=2, environment=offers),
        EngineSpec("b", str(tiny[1])),
        EngineSpec("c", str(tiny[1]), environment=offers),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(source_rank, "join", source_rank.join)
        stand_in_at_a_source()
        with LaunchedFleet(engines, directory=tmp_path_factory.mktemp("fleet"), module="with_nccl") as fleet:
            yield fleet


def writes(fleet: Fleet) -> list[list[str]]:
    """Who took in each write, the newest first."""
    return [list(operation.targets) for operation in fleet.operations(verb="UpdateWeightsFromDistributed")]


def test_some_by_nccl_and_some_by_gloo_in_one_commit(mixed: LaunchedFleet, tmp_path: Path) -> None:
    with mixed.connect() as fleet:
        seeds = [81, 82]
        said = train(fleet, tmp_path, seeds=seeds, backend=BOTH, **PP_TP)
        wanted = [update.get("digest", update) for update in said[0]]
        assert all(holds([digest], demo_tiny.make(seed=seed)) for digest, seed in zip(wanted, seeds, strict=True))
        assert [[update.get("digest", update) for update in rank] for rank in said] == [wanted] * 4
        assert held(fleet) == {wanted[-1]}
        # Two sources, each with a group for either backend, kept from update to update.
        joined = [list(operation.targets) for operation in fleet.operations(verb="InitWeightsUpdateGroup")]
        assert sorted(joined) == [["a", "c"], ["a", "c"], ["b"], ["b"]]
        assert sorted(writes(fleet)) == [["a", "c"], ["a", "c"], ["b"], ["b"]]


def test_when_an_engine_dies_the_groups_of_both_kinds_start_over(mixed: LaunchedFleet) -> None:
    with mixed.connect() as fleet:
        publisher = fleet.publisher("actor", backend=BOTH, bucket_bytes=16 << 10)
        model = demo_tiny.make(seed=84)
        weights = Interrupted(model, mixed.process("c").kill)
        result = publisher.update(weights, version="without-c", quorum=2, retries=1, deadline_s=60)
        assert (weights.passes, result.operation.state) == (2, OPERATION_STATE_PARTIAL)
        outcomes = {stage.slot: stage.outcome for stage in result.operation.stage_results}
        assert (outcomes["a"], outcomes["b"]) == (common.OUTCOME_APPLIED, common.OUTCOME_APPLIED)
        assert holds(held(fleet, "a", "b"), model)
        assert sorted(writes(fleet)[:2]) == [["a"], ["b"]]
        publisher.close()
