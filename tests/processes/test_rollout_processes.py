"""Rollouts while real processes die."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlctl.launch.fleet_controller import LaunchedFleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

LONG = 2000


def test_samples_of_an_engine_that_is_killed_go_on_at_another_from_the_tokens_had(fake_fleet: LaunchedFleet) -> None:
    with fake_fleet.connect() as fleet, ThreadPoolExecutor(1) as pool:
        rollout = fleet.rollout("actor")
        generating = pool.submit(rollout.generate, [0], n=6, max_new_tokens=LONG, timeout_s=60)
        time.sleep(0.5)
        fake_fleet.process("a").kill()
        samples = generating.result()
    assert all(sample.output_ids == list(range(1, LONG + 1)) for sample in samples)
    assert all(len(sample.logprobs) == len(sample.versions) == LONG and sample.staleness == 0 for sample in samples)
    moved = [sample for sample in samples if [part.slot for part in sample.parts] == ["a", "b"]]
    assert len(moved) == 3
    assert all(sample.parts[1].start > 0 for sample in moved)
