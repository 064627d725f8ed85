"""Faults in the midst of updates of torch engines, one of them of two ranks, by a trainer of two processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chaos_fleet import ChaosFleet, Kept
from history import History
from scenario import Fault, matrix, name_of, run

from rlctl.demo import tiny
from rlctl.launch.fleet_controller import EngineSpec

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

RANKS = {"a": 2, "b": 1}
DEADLINE_S = 40.0

PROCESSES = ("coordinator", "a", "a.1", "source", "trainer")

LONG = [
    # Longer than a serving lease.
    Fault("a", "stop", "publish", 12.0),
    Fault("coordinator", "stop", "commit", 12.0),
    # The network's.
    Fault("b", "reset", "write", 0.5),
    Fault("b", "blackhole", "write", 8.0),
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    def make() -> ChaosFleet:
        directory = tmp_path_factory.mktemp("chaos")
        tiny.save(tiny.make(seed=3), directory / "checkpoint")
        engines = [EngineSpec(slot, str(directory / "checkpoint"), tp_size=ranks) for slot, ranks in RANKS.items()]
        return ChaosFleet(engines, directory=directory / "fleet")

    fleets = Kept(make)
    yield fleets
    fleets.close()


@pytest.mark.parametrize("fault", [Fault("source", "kill", "write", 0.5)], ids=name_of)
def test_a_fault_in_an_update_is_survived(kept: Kept, fault: Fault) -> None:
    play(kept, fault)


@pytest.mark.long
@pytest.mark.parametrize("fault", LONG, ids=name_of)
def test_longer_faults_and_the_networks_are_survived(kept: Kept, fault: Fault) -> None:
    play(kept, fault)


@pytest.mark.long
@pytest.mark.parametrize("fault", matrix(PROCESSES), ids=name_of)
def test_every_process_is_killed_and_stopped_at_every_phase(kept: Kept, fault: Fault) -> None:
    play(kept, fault)


def play(kept: Kept, fault: Fault) -> None:
    with kept.fleet() as fleet:
        run(fleet, "torch", History(RANKS), fault, deadline_s=DEADLINE_S)
