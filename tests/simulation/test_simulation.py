"""The promises hold under every stored seed, and safeguards that are turned off are missed by one of them."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulator.context import Counts
from tests.simulator.mutants import MUTANTS
from tests.simulator.runner import run
from tests.simulator.shrink import shrink

FOLDER = Path(__file__).parents[1] / "simulator"

SEEDS = range(1000, 1030)

FOUND = (
    *(4021, 4047, 4230, 4350, 9092, 20082, 20521, 21564, 267599, 279959, 280485, 282514, 331586, 344499),
    *(900651, 910789, 922379, 966955, 986310, 990475, 2000000, 3000079, 3400631, 3511658, 3720863),
    3723651,
)
"""Seeds that showed a fault, which was mended. 267599, 279959, 344499, 900651, 986310, 990475, 3000079, 3511658,
3720863 and 3723651 showed faults of the simulation.
"""

CAUGHT_BY = {
    "adapter_gate": 1017,
    "adapter_scope": 1146,
    "adapter_seal": 1166,
    "admission": 1000,
    "at_most_once": 1021,
    "bucket_order": 1022,
    "completeness": 1102,
    "decode_check": 1240,
    "dirty_refusal": 1000,
    "fencing": 1004,
    "follower_link": 1011,
    "grant_order": 1049,
    "idempotency": 1000,
    "journal_fencing": 1010,
    "kept_adapter_pauses": 1080,
    "kept_pauses": 1018,
    "kept_weights": 1093,
    "late_results": 1004,
    "lease_echo": 1118,
    "lease_expiry": 1049,
    "ongoing_gate": 1020,
    "partial_end": 1438,
    "presumed_abort": 1000,
    "probe": 1011,
    "publish_last": 1000,
    "quarantine": 1744,
    "second_stage": 1008,
    "serving_lease": 1002,
    "shielding": 1020,
    "silence": 1010,
    "verification": 1174,
    "uncertain_end": 1020,
    "unpublished": 1000,
    "vetting": 1065,
}
"""The seed from which on one is looked for that shows a safeguard to be needed: it moves with every change of what the
state machines do or of how long they take for it."""

RANGE = 200


@pytest.mark.parametrize("seed", [*SEEDS, *FOUND])
def test_the_promises_hold(seed: int) -> None:
    assert run(seed).violations == []


@pytest.mark.parametrize("safeguard", sorted(CAUGHT_BY))
def test_a_safeguard_that_is_turned_off_is_missed(safeguard: str) -> None:
    assert run(caught_by(safeguard)).violations == [], "the seed shows something else"


@functools.cache
def caught_by(safeguard: str) -> int:
    """The first seed under which a promise is broken without the safeguard. A defect (I0) may be the mutant's own."""
    first = CAUGHT_BY[safeguard]
    for seed in range(first, first + RANGE):
        violations = run(seed, frozenset({safeguard})).violations
        if any(not violation.startswith("I0:") for violation in violations):
            return seed
    raise AssertionError(f"{RANGE} seeds from {first} on do not miss {safeguard}")


def test_a_seed_is_known_for_every_safeguard() -> None:
    assert set(CAUGHT_BY) == set(MUTANTS)


def test_a_seed_is_the_same_every_time_whether_or_not_it_is_told() -> None:
    told, again, silent = run(SEEDS[2], telling=True), run(SEEDS[2], telling=True), run(SEEDS[2])
    assert told.counts.tokens > 0
    assert told.history == again.history
    assert told.counts == again.counts == silent.counts


def test_a_seed_is_as_busy_as_it_should_be() -> None:
    total = Counts()
    for seed in SEEDS[:10]:
        total.add(run(seed).counts)
    assert total.stages >= 80
    assert total.operations >= 200
    assert total.faults >= 100


def test_what_a_failure_does_not_need_is_left_out() -> None:
    off = frozenset({"completeness"})
    failed = run(caught_by("completeness"), off)
    dropped = shrink(failed, off, 40)
    assert len(dropped) > len(set(failed.steps)) // 2
    assert run(failed.seed, off, dropped=dropped).violations != []


def test_a_failing_seed_is_found_and_explained_whichever_process_runs_it() -> None:
    command = [sys.executable, "-m", "tests.simulator", "--break", "completeness", "--no-shrink", "--jobs", "2"]
    first = caught_by("completeness")
    ended = subprocess.run(
        [*command, "--seed", str(first - 1), "--seeds", "4"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"seed {first}: I1: " in ended.stdout
    assert "VIOLATED I1" in ended.stdout
    assert "1 failing" in ended.stdout


def test_only_the_ports_are_replaced() -> None:
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith(("grpc", "sqlite3", "torch", "rlctl.transport", "rlctl.testing")), name
