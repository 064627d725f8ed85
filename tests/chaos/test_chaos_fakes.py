"""Faults in the midst of updates of three fake engines, each a process, behind proxies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos_fleet import ChaosFleet
from history import History
from scenario import PHASES, Fault, run

from rlctl.launch.fleet import EngineSpec

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SLOTS = ("a", "b", "c")
DEADLINE_S = 20.0


@pytest.fixture
def three(tmp_path: Path, checkpoint: Callable[[str], str]) -> Iterator[ChaosFleet]:
    options = {"delay": "0.1", "pace": "0.01"}
    engines = [EngineSpec(slot, checkpoint("one"), engine="fake", options=options) for slot in SLOTS]
    with ChaosFleet(engines, directory=tmp_path / "fleet") as fleet:
        yield fleet


def drawn(seed: int) -> Fault:
    """A fault, by its seed."""
    chance = random.Random(seed)
    kind = chance.choice(["kill", "stop", "latency", "blackhole", "reset"])
    victims = (*SLOTS, "coordinator", "trainer") if kind in ("kill", "stop") else SLOTS
    # Short of what is given up as silent, longer than that, and longer than a serving lease.
    return Fault(chance.choice(victims), kind, chance.choice(list(PHASES)), chance.choice([0.5, 2.0, 7.0, 13.0]))


def play(fleet: ChaosFleet, fault: Fault) -> None:
    run(fleet, "null", History(dict.fromkeys(SLOTS, 1)), fault, deadline_s=DEADLINE_S)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("coordinator", "kill", "commit", 0.5),
        Fault("b", "kill", "write", 0.5),
        Fault("a", "blackhole", "publish", 7.0),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.victim}-{fault.phase}",
)
def test_a_fault_in_an_update_is_survived(three: ChaosFleet, fault: Fault) -> None:
    play(three, fault)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_any_fault_is_survived(three: ChaosFleet, seed: int) -> None:
    play(three, drawn(seed))
