"""The demo: it passes by itself, and it fails whenever one thing is broken on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def run(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """(exit code, objects on stdout, stderr) of ``rlctl demo --json``."""
    done = subprocess.run(
        [sys.executable, "-m", "rlctl", "demo", "--json", *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def check_passed(code: int, objects: list[dict[str, Any]], stderr: str, steps: int = 40) -> None:
    *seen, verdict = objects
    assert code == 0, stderr
    assert verdict["passed"]
    assert round(verdict["reward_last"] - verdict["reward_first"], 9) >= 0.1
    assert verdict["checksums_equal"]
    assert verdict["max_logprob_diff"] < 1e-4
    assert [step["step"] for step in seen] == list(range(1, steps + 1))
    expected = [step["expected"] for step in seen]
    assert len(set(expected)) == steps, "the weights changed at every step"
    assert all(set(step["digests"].values()) == {step["expected"]} for step in seen)
    assert all(set(step["digests"]) == {"actor-0", "actor-1"} for step in seen)
    assert all(step["pause_ms"] > 0 and step["transfer_ms"] > 0 and step["tokens_per_s"] > 0 for step in seen)


def test_the_demo_passes_and_plots(tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    check_passed(*run("--plot", str(plot)))
    assert plot.read_bytes().startswith(b"\x89PNG")


# What is finished first, and so how much eight steps teach, is chance when training waits for nobody.
@pytest.mark.parametrize(
    ("mode", "steps", "staleness"),
    [pytest.param("one-step-off", 8, {1}, marks=pytest.mark.long), ("async", 24, {1, 2, 3, 4})],
)
def test_samples_made_beside_training_are_of_the_versions_that_they_say(
    mode: str, steps: int, staleness: set[int]
) -> None:
    code, objects, stderr = run("--steps", str(steps), "--mode", mode)
    check_passed(code, objects, stderr, steps=steps)
    assert objects[-1]["max_staleness"] in staleness, "and some were behind, or nothing was shown"


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_the_demo_passes_with_other_seeds(seed: int) -> None:
    check_passed(*run("--seed", str(seed)))


@pytest.mark.parametrize(
    ("sabotage", "step"),
    [
        pytest.param("skip-sync", 2, marks=pytest.mark.long),
        ("stale-engine", 1),
        pytest.param("drop-tensor", 1, marks=pytest.mark.long),
        ("wrong-rank", 1),
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
