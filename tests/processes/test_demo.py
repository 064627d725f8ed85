"""The demo: its modes and seeds, and that it fails whenever one thing is broken on purpose.

A shorter run of the plain demo is where the wheel is installed: tests/packaging.
"""

from __future__ import annotations

import pytest
from demo_runs import check_passed, run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


# What is finished first, and so how much eight steps teach, is chance when training waits for nobody.
@pytest.mark.parametrize(
    ("mode", "steps", "staleness"),
    [("one-step-off", 8, {1}), pytest.param("async", 24, {1, 2, 3, 4}, marks=pytest.mark.long)],
)
def test_samples_made_beside_training_are_of_the_versions_that_they_say(
    mode: str, steps: int, staleness: set[int]
) -> None:
    code, objects, stderr = run("--steps", str(steps), "--mode", mode)
    check_passed(code, objects, stderr, steps=steps)
    assert objects[-1]["max_staleness"] in staleness, "and some were behind, or nothing was shown"


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_whole_demo_passes_with_several_seeds(seed: int) -> None:
    check_passed(*run("--seed", str(seed)))


@pytest.mark.parametrize(
    ("sabotage", "step"),
    [
        pytest.param("skip-sync", 2, marks=pytest.mark.long),
        pytest.param("stale-engine", 1, marks=pytest.mark.long),
        pytest.param("drop-tensor", 1, marks=pytest.mark.long),
        ("wrong-rank", 1),
        pytest.param("stale-decode", 1, marks=pytest.mark.long),
    ],
)
def test_a_sabotaged_demo_ends_at_the_first_failing_step(sabotage: str, step: int) -> None:
    code, objects, _ = run("--steps", "4", "--sabotage", sabotage)
    *seen, verdict = objects
    assert code == 1
    assert not verdict["passed"]
    assert not verdict["checksums_equal"]
    assert verdict["problem"] == seen[-1]["problem"] != ""
    assert len(seen) == step
    assert not any(earlier["problem"] for earlier in seen[:-1])
