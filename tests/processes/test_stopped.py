"""Ranks that are stopped (SIGSTOP) while they take weights in: until they go on, nothing tells them from slow ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from digests import holds
from interrupted_weights import Interrupted
from up_helpers import restarted, when

import rlctl
from rlctl.command_stream.commander import SILENCE_S
from rlctl.contract.errors import RlctlError
from rlctl.demo import tiny as demo_tiny
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_PARTIAL

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]

DEADLINE_S = SILENCE_S + 2
LATE_S = 12.0
"""An update's end may be this much later than its deadline: it is aborted first, for 5 s at most; the rest is a busy
machine."""


@pytest.fixture
def two(tmp_path: Path, tiny: tuple[Any, Path]) -> Iterator[LaunchedFleet]:
    """An engine with two ranks and one with a single rank."""
    engines = [EngineSpec("a", str(tiny[1]), tp_size=2), EngineSpec("b", str(tiny[1]))]
    with LaunchedFleet(engines, directory=tmp_path / "fleet") as fleet:
        yield fleet


def stopped_in_an_update(
    two: LaunchedFleet, fleet: Fleet, publisher: rlctl.Publisher, name: str, **settings: Any
) -> str:
    """The rank is stopped half way, and goes on once the update has failed, by its deadline; returns what it says."""
    publisher.update(demo_tiny.make(seed=1), version="before")
    pid = two.process(name).pid
    weights = Interrupted(demo_tiny.make(seed=2), lambda: os.kill(pid, signal.SIGSTOP))
    started = time.monotonic()
    try:
        with pytest.raises(RlctlError) as caught:
            publisher.update(weights, version="never", deadline_s=DEADLINE_S, **settings)
        assert time.monotonic() - started < DEADLINE_S + LATE_S
        assert stage(fleet, "b").state == common.STAGE_STATE_DIRTY
        assert not stage(fleet, "a").routable
        assert fleet.status().models[0].latest.label == "before"
        return str(caught.value)
    finally:
        os.kill(pid, signal.SIGCONT)


def stage(fleet: Fleet, slot: str) -> Stage:
    return next(stage for stage in fleet.status().stages if stage.registration.slot == slot)


def held(fleet: Fleet, *slots: str) -> set[str]:
    operation = fleet.check_weights(slots=slots)
    return {rank.check.model_digest for stage in operation.stage_results for rank in stage.rank_results}


def test_a_rank_zero_that_goes_on_is_written_by_the_next_update(two: LaunchedFleet) -> None:
    with two.connect() as fleet:
        publisher = fleet.publisher("actor", bucket_bytes=16 << 10)
        stopped_in_an_update(two, fleet, publisher, "a")
        when(fleet, lambda now: now["a"].state == common.STAGE_STATE_DIRTY and not open_update(fleet))
        assert [rank.alive for rank in stage(fleet, "a").report.ranks] == [True, True], (
            "it was the one that was stopped"
        )
        model = demo_tiny.make(seed=3)
        result = publisher.update(model, version="after", deadline_s=60)
        assert result.operation.state == OPERATION_STATE_OK
        assert holds(held(fleet), model)
        assert [(stage.routable, stage.incarnation) for stage in fleet.status().stages] == [(True, 1), (True, 1)]
        publisher.close()


def test_without_a_follower_the_others_are_written_and_its_engine_heals_after_its_restart(two: LaunchedFleet) -> None:
    with two.connect() as fleet:
        publisher = fleet.publisher("actor", bucket_bytes=16 << 10)
        said = stopped_in_an_update(two, fleet, publisher, "a.1", quorum=1)
        assert said.endswith("in another attempt: retries=1.")
        when(fleet, lambda _: not open_update(fleet))
        assert [rank.alive for rank in stage(fleet, "a").report.ranks] == [True, False]
        model = demo_tiny.make(seed=3)
        result = publisher.update(model, version="after", quorum=1, deadline_s=60)
        assert result.operation.state in (OPERATION_STATE_OK, OPERATION_STATE_PARTIAL)
        assert holds(held(fleet, "b"), model)
        assert (stage(fleet, "b").routable, stage(fleet, "b").incarnation) == (True, 1)
        restarted(two, fleet, "a")
        assert holds(held(fleet), model)
        publisher.close()


def open_update(fleet: Fleet) -> bool:
    return bool(fleet.status().models[0].update_id)
