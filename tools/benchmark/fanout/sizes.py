"""vs_streams_*, vs_http_*, growth: one recorded admin verb to many stages, beside bare streams and HTTP."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence

from google.protobuf.any_pb2 import Any

from rlctl.contract.durations import duration
from rlctl.ports import new_uuid7
from rlctl.sdk.blocking import Fleet
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.control_pb2 import Command, ControlRequest
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.verbs_pb2 import FlushCacheRequest
from tools.benchmark.fanout.peers import Peers
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.null_fleet import NullFleet
from tools.benchmark.rounds import Spread, interleaved, median, ratios

SIZES = (64, 256, 1024)
CALLS = {64: 15, 256: 7, 1024: 3}
"""Calls in a row; their median is a round's sample."""

Samples = Mapping[str, Sequence[float]]


def _stages(setting: Setting, size: int) -> int:
    return size // 16 if setting.quick else size


def _samples(size: int, setting: Setting) -> Samples:
    """Return seconds by side: "product", "streams", "posts"."""
    stages, calls = _stages(setting, size), 1 if setting.quick else CALLS[size]
    directory = setting.directory / f"fanout-{size}"
    with (
        NullFleet(directory, stages=stages, ranks=1) as null,
        null.connect() as fleet,
        Peers(directory, stages, _message()) as peers,
    ):
        setting.say(f"{stages} stages, and as many peers")
        sides = {"product": lambda: _flush(fleet, stages), "streams": peers.streams, "posts": peers.posts}
        return interleaved(setting.rounds, {name: _repeated(run, calls) for name, run in sides.items()})


def _repeated(run: Callable[[], float], calls: int) -> Callable[[], float]:
    return lambda: median([run() for _ in range(calls)])


def _flush(fleet: Fleet, stages: int) -> float:
    """Send a FlushCache through the SDK: recorded, sent to every stage, all outcomes recorded; return seconds."""
    started = time.perf_counter()
    operation = fleet.call(FlushCacheRequest())
    elapsed = time.perf_counter() - started
    if operation.state != OPERATION_STATE_OK or len(operation.stage_results) != stages:
        raise AssertionError(f"{len(operation.stage_results)} of {stages} stages answered: {operation.error}")
    return elapsed


def _message() -> bytes:
    """Return a command as sent to a stage."""
    packed = Any()
    packed.Pack(FlushCacheRequest(header=RequestHeader(request_id=new_uuid7())))
    operation_id = new_uuid7()
    command = Command(
        command_id=f"{operation_id}/actor-100/1/1",
        operation_id=operation_id,
        time_remaining=duration(59.75),
        request=packed,
    )
    return ControlRequest(command=command).SerializeToString()


_SAMPLES = {size: functools.partial(_samples, size) for size in SIZES}


def _against(size: int, side: str, unit: str) -> Callable[[Setting], Reading]:
    def measure(setting: Setting) -> Reading:
        samples = setting.once(_SAMPLES[size])
        return Reading.of(
            ratios(samples["product"], samples[side]),
            floor=median(samples[side]) * 1e3,
            floor_unit=unit,
            product_ms=median(samples["product"]) * 1e3,
            stages=_stages(setting, size),
        )

    return measure


def _growth(setting: Setting) -> Reading:
    small, large = (setting.once(_SAMPLES[size])["product"] for size in (SIZES[0], SIZES[-1]))
    factor = SIZES[-1] / SIZES[0]
    return Reading.of(Spread.of([sample / median(small) / factor for sample in large]))


def _streams(size: int, at_most: float) -> Figure:
    what = f"FlushCache to {size} stages, recorded before and after ÷ a message over {size} bare open streams and back"
    return Figure(f"vs_streams_{size}", what, "ratio", _against(size, "streams", "ms over streams"), at_most=at_most)


def _http(size: int, at_most: float) -> Figure:
    what = f"the same to {size} stages ÷ an aiohttp POST to each, replies recorded in a journal alike"
    return Figure(f"vs_http_{size}", what, "ratio", _against(size, "posts", "ms by HTTP"), at_most=at_most)


FIGURES = [
    _streams(64, 3.0),
    _streams(256, 2.0),
    _http(256, 1.0),
    _streams(1024, 2.0),
    _http(1024, 1.0),
    Figure("growth", "FlushCache to 1,024 stages ÷ to 64 ÷ 16", "ratio", _growth, at_most=1.5),
]
