"""Runs of ``rlctl demo``, and checks of a passing run's output."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forking import NURSERY

LONGEST_S = 600.0


def run(
    *arguments: str,
    command: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> tuple[int, list[dict[str, Any]], str]:
    """Return (exit code, objects on stdout, stderr) of ``rlctl demo --json``; without ``command`` it is forked."""
    if command:
        done = subprocess.run(
            [*command, "demo", "--json", *arguments], cwd=directory, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    else:
        done = NURSERY.run("demo", "--json", *arguments, timeout_s=LONGEST_S)
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
    assert all(step["verified"] == dict.fromkeys(step["digests"], "expected") for step in seen)
    assert all(step["evidence"] == dict.fromkeys(step["digests"], "rank") for step in seen)
    assert all(step["pause_ms"] > 0 and step["transfer_ms"] > 0 and step["tokens_per_s"] > 0 for step in seen)
