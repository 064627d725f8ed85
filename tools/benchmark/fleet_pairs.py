"""One recorded admin verb to many stages of two fleets, in turns: what a setting of a fleet costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rlctl.sdk.blocking import Fleet
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.verbs_pb2 import FlushCacheRequest
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.null_fleet import NullFleet
from tools.benchmark.rounds import interleaved, median, ratios

STAGES = 256
CALLS = 7
"""Calls in a row; their median is a round's sample."""


def measure(
    setting: Setting,
    name: str,
    *,
    metrics: str = "",
    mtls: bool = False,
    during: Callable[[NullFleet], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Reading:
    """Measure a fleet with these settings ÷ one without.

    ``during``: work at the fleet with the settings while both are measured.
    """
    stages, calls = (16, 1) if setting.quick else (STAGES, CALLS)
    with (
        NullFleet(setting.directory / f"{name}-without", stages=stages, ranks=1) as without,
        NullFleet(setting.directory / f"{name}-with", stages=stages, ranks=1, metrics=metrics, mtls=mtls) as measured,
        without.connect() as plain,
        measured.connect() as fleet,
        during(measured),
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
