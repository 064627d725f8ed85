"""Admin calls beside many streams: the fleet in separate processes, and the streams' caller in a further process."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlctl.sdk.blocking import Fleet, connect
from rlctl.v1.verbs_pb2 import GetLoadsRequest
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.rounds import Spread
from tools.benchmark.servers import Servers, announced, server

STREAMS = 4000
PACE_S = 2.0
"""Seconds between two tokens of a stream."""


@contextmanager
def running(setting: Setting) -> Iterator[str]:
    """Start a coordinator and two stages; yield the coordinator's address."""
    directory = Path(setting.directory) / "admin"
    directory.mkdir(exist_ok=True)
    (directory / "weights.txt").write_text("slow")
    with Servers() as servers:
        coordinator = servers.coordinator(directory)
        engine = ("--engine", "fake", "--option", f"pace={PACE_S}", "--model-path", str(directory))
        for slot in ("a", "b"):
            servers.rlctl("stage", "--slot", slot, "--coordinator", coordinator, *engine)
        yield coordinator


def measure(setting: Setting) -> Reading:
    """Measure the 99th percentile of calls with streams ÷ without, and its milliseconds; a further detail has streams
    as separate gRPC calls without the SDK.
    """
    coordinator = setting.shared(running)
    streams = 200 if setting.quick else STREAMS
    calls = 50 if setting.quick else 300
    with connect(coordinator) as fleet:
        fleet.generate("x", max_new_tokens=0, timeout_s=30.0)
        _calls(fleet, calls)
        idle = [_calls(fleet, calls) for _ in range(setting.rounds)]

        def loaded(*how: str) -> tuple[list[float], int]:
            command = [sys.executable, "-m", "tools.benchmark.rollout.streams", coordinator, str(streams), *how]
            with server(command) as asking:
                announced(asking)
                return [_calls(fleet, calls) for _ in range(setting.rounds)], _running(fleet)

        under, running_now = loaded()
        apart, _ = loaded("--apart")
    spread = Spread.of([one / other for one, other in zip(under, idle, strict=True)])
    return Reading.of(
        spread,
        floor=statistics.median(idle),
        floor_unit="ms",
        loaded_ms=statistics.median(under),
        apart_ms=statistics.median(apart),
        streams=streams,
        running=running_now,
    )


def _running(fleet: Fleet) -> int:
    """Return the number of running requests."""
    stages = fleet.call(GetLoadsRequest()).stage_results
    return sum(rank.loads.running for stage in stages for rank in stage.rank_results)


def _calls(fleet: Fleet, count: int) -> float:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        fleet.call(GetLoadsRequest())
        took.append((time.perf_counter() - began) * 1000)
    return statistics.quantiles(took, n=100, method="inclusive")[98]
