"""fan_out: one recorded admin verb to many stages, with and without metrics of the coordinator."""

from __future__ import annotations

import time

from rlctl.sdk.blocking import Fleet
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.verbs_pb2 import FlushCacheRequest
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.metrics.scraper import scraped
from tools.benchmark.null_fleet import NullFleet
from tools.benchmark.rounds import interleaved, median, ratios

STAGES = 256
CALLS = 7
"""Calls in a row; their median is a round's sample."""


def measure(setting: Setting) -> Reading:
    """Measure two fleets in turns."""
    stages, calls = (16, 1) if setting.quick else (STAGES, CALLS)
    with (
        NullFleet(setting.directory / "fan-out-without", stages=stages, ranks=1) as without,
        NullFleet(setting.directory / "fan-out-with", stages=stages, ranks=1, metrics="127.0.0.1:0") as measured,
        without.connect() as plain,
        measured.connect() as fleet,
        scraped([measured.coordinator.facts["metrics_address"]]),
    ):
        sides = {"with": lambda: _flush(fleet, calls), "without": lambda: _flush(plain, calls)}
        samples = interleaved(setting.rounds, sides)
    return Reading.of(
        ratios(samples["with"], samples["without"]),
        floor=median(samples["without"]) * 1e3,
        floor_unit="ms without",
        stages=stages,
    )


def _flush(fleet: Fleet, calls: int) -> float:
    took = []
    for _ in range(calls):
        started = time.perf_counter()
        operation = fleet.call(FlushCacheRequest())
        took.append(time.perf_counter() - started)
        if operation.state != OPERATION_STATE_OK:
            raise AssertionError(f"it ended {operation.state}: {operation.error}")
    return median(took)
