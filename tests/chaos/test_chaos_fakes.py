"""Faults in the midst of updates of three fake engines, each a process, behind proxies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_fleet import ChaosFleet, Kept
from history import History
from scenario import PHASES, Fault, matrix, name_of, run

from rlctl.launch.fleet_controller import EngineSpec

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

RANKS = dict.fromkeys("abc", 1)
DEADLINE_S = 20.0

PROCESSES = ("coordinator", "a", "trainer")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    def make() -> ChaosFleet:
        directory: Path = tmp_path_factory.mktemp("chaos")
        (directory / "weights.txt").write_text("one")
        options = {"delay": "0.1", "pace": "0.01"}
        engines = [EngineSpec(slot, str(directory), engine="fake", options=options) for slot in RANKS]
        return ChaosFleet(engines, directory=directory / "fleet")

    fleets = Kept(make)
    yield fleets
    fleets.close()


def drawn(seed: int) -> Fault:
    """A fault, by its seed."""
    chance = random.Random(seed)
    kind = chance.choice(["kill", "stop", "latency", "blackhole", "reset"])
    victims = (*RANKS, "coordinator", "trainer") if kind in ("kill", "stop") else tuple(RANKS)
    # Short of what is given up as silent, longer than that, and longer than a serving lease.
    return Fault(chance.choice(victims), kind, chance.choice(list(PHASES)), chance.choice([0.5, 2.0, 7.0, 13.0]))


def play(kept: Kept, fault: Fault) -> None:
    with kept.fleet() as fleet:
        run(fleet, "null", History(RANKS), fault, deadline_s=DEADLINE_S)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("coordinator", "kill", "commit", 0.5),
        Fault("b", "kill", "write", 0.5),
        Fault("a", "blackhole", "publish", 7.0),
    ],
    ids=name_of,
)
def test_a_fault_in_an_update_is_survived(kept: Kept, fault: Fault) -> None:
    play(kept, fault)


@pytest.mark.long
@pytest.mark.parametrize("fault", matrix(PROCESSES), ids=name_of)
def test_every_process_is_killed_and_stopped_at_every_phase(kept: Kept, fault: Fault) -> None:
    play(kept, fault)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_any_fault_is_survived(kept: Kept, seed: int) -> None:
    play(kept, drawn(seed))
