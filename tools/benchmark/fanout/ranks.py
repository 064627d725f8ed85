"""tp8: the added time of a stage's ranks for a verb."""

from __future__ import annotations

import time
from collections.abc import Callable

from rlctl.launch.local.child_processes import Process, stop_all
from rlctl.sdk.blocking import Fleet, connect
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.verbs_pb2 import FlushCacheRequest
from tools.benchmark import ranked_stage
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.null_fleet import START_S, until_routable
from tools.benchmark.rounds import interleaved, median, ratios

RANKS = {"one": 1, "eight": 8}
CALLS = 25
"""Calls in a row; their median is a round's sample."""


def _measure(setting: Setting) -> Reading:
    directory = setting.directory / "ranks"
    directory.mkdir()
    (directory / "weights.txt").write_text("one")
    processes: list[Process] = []
    try:
        arguments = ["coordinator", "--listen", "127.0.0.1:0", "--journal", str(directory / "journal.db")]
        processes.append(Process("coordinator", arguments, directory / "coordinator.log", {}))
        address = processes[0].announced(START_S)["address"]
        for slot, ranks in RANKS.items():
            where = ["--coordinator", address, "--slot", slot, "--checkpoint", str(directory)]
            log = directory / f"{slot}.log"
            processes.append(Process(slot, [*where, "--ranks", str(ranks)], log, {}, ranked_stage.__name__))
        for process in processes:
            process.announced(START_S)
        with connect(address) as fleet:
            until_routable(fleet, len(RANKS))
            calls = 3 if setting.quick else CALLS
            samples = interleaved(setting.rounds, {slot: _flushes(fleet, slot, calls) for slot in RANKS})
    finally:
        stop_all(processes)
    one, eight = samples["one"], samples["eight"]
    return Reading.of(
        ratios(eight, one), floor=median(one) * 1e3, floor_unit="ms, one rank", eight_ms=median(eight) * 1e3
    )


def _flushes(fleet: Fleet, slot: str, calls: int) -> Callable[[], float]:
    def one() -> float:
        started = time.perf_counter()
        operation = fleet.call(FlushCacheRequest(header=RequestHeader(target=Target(slots=[slot]))))
        elapsed = time.perf_counter() - started
        results = operation.stage_results[0].rank_results
        if operation.state != OPERATION_STATE_OK or len(results) != RANKS[slot]:
            raise AssertionError(f"{len(results)} of {RANKS[slot]} ranks answered: {operation.error}")
        return elapsed

    return lambda: median([one() for _ in range(calls)])


FIGURE = Figure("tp8", "FlushCache to a stage of 8 ranks ÷ to a stage of 1", "ratio", _measure, at_most=2)
