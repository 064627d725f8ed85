"""Faults in the midst of updates of torch engines, one of them of two ranks, by a trainer of two processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_fleet import ChaosFleet
from history import History
from scenario import Fault, run

from rlctl.demo import tiny
from rlctl.launch.fleet import EngineSpec

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

RANKS = {"a": 2, "b": 1}
DEADLINE_S = 40.0

LONG = [
    Fault("a.1", "kill", "write", 0.5),
    Fault("a.1", "stop", "commit", 3.0),
    Fault("a", "kill", "write", 0.5),
    Fault("a", "stop", "publish", 12.0),
    Fault("b", "reset", "write", 0.5),
    Fault("b", "blackhole", "write", 8.0),
    Fault("coordinator", "kill", "write", 0.5),
    Fault("coordinator", "stop", "commit", 12.0),
    Fault("source", "stop", "write", 8.0),
    Fault("trainer", "kill", "write", 0.5),
    Fault("trainer", "stop", "join", 8.0),
]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[ChaosFleet]:
    checkpoint = tmp_path / "checkpoint"
    tiny.save(tiny.make(seed=3), checkpoint)
    engines = [EngineSpec(slot, str(checkpoint), tp_size=ranks) for slot, ranks in RANKS.items()]
    with ChaosFleet(engines, directory=tmp_path / "fleet") as fleet:
        yield fleet


def name_of(fault: Fault) -> str:
    return f"{fault.kind}-{fault.victim}-{fault.phase}"


@pytest.mark.parametrize("fault", [Fault("source", "kill", "write", 0.5)], ids=name_of)
def test_a_fault_in_an_update_is_survived(two: ChaosFleet, fault: Fault) -> None:
    run(two, "torch", History(RANKS), fault, deadline_s=DEADLINE_S)


@pytest.mark.long
@pytest.mark.parametrize("fault", LONG, ids=name_of)
def test_more_faults_are_survived(two: ChaosFleet, fault: Fault) -> None:
    run(two, "torch", History(RANKS), fault, deadline_s=DEADLINE_S)
