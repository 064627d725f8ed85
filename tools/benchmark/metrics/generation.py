"""stage_streams, gateway_requests: generation by an engine that answers at once, with and without metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlctl.sdk.blocking import connect
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.metrics.scraper import scraped
from tools.benchmark.rollout import clients
from tools.benchmark.rollout.ways import BODY, PROMPT
from tools.benchmark.rounds import interleaved, median, ratios
from tools.benchmark.servers import Servers, post_all

COUNT = 300
AT_ONCE = 32
ROUNDS = 15
"""Times the rounds of other figures: the goal is a difference of some percent, and rounds differ by ten."""


@dataclass(frozen=True)
class _Fleet:
    """Addresses: the coordinator's, the gateway's /generate, and all metrics addresses."""

    coordinator: str
    generate: str
    metrics: tuple[str, ...]


@contextmanager
def _fleet(setting: Setting, name: str, options: list[str]) -> Iterator[_Fleet]:
    directory = setting.directory / name
    directory.mkdir(exist_ok=True)
    (directory / "weights.txt").write_text("light")
    with Servers() as servers:
        journal = str(directory / "journal.db")
        coordinator = servers.rlctl("coordinator", "--journal", journal, *options)
        at = ("--coordinator", str(coordinator["address"]), *options)
        engine = ("--engine", "fake", "--model-path", str(directory))
        stage = servers.rlctl("stage", "--slot", "a", *engine, *at, module="tools.benchmark.rollout.light")
        gateway = servers.rlctl("gateway", *at)
        with connect(coordinator["address"]) as fleet:
            fleet.generate(PROMPT, max_new_tokens=1, timeout_s=30.0)  # waits until the stage serves
        started = (coordinator, stage, gateway)
        metrics = tuple(str(each["metrics_address"]) for each in started if "metrics_address" in each)
        yield _Fleet(str(coordinator["address"]), f"{gateway['address']}/generate", metrics)


@dataclass(frozen=True)
class _Fleets:
    measured: _Fleet
    without: _Fleet


@contextmanager
def _both(setting: Setting) -> Iterator[_Fleets]:
    with (
        _fleet(setting, "generation-with", ["--metrics", "127.0.0.1:0"]) as measured,
        _fleet(setting, "generation-without", []) as without,
        scraped(measured.metrics),
    ):
        yield _Fleets(measured, without)


def streams(setting: Setting) -> Reading:
    """Measure streams of the SDK."""
    return _compared(setting, lambda fleet, count: clients.sdk_streams(fleet.coordinator, count, AT_ONCE))


def requests(setting: Setting) -> Reading:
    """Measure SGLang's /generate."""
    return _compared(setting, lambda fleet, count: post_all(fleet.generate, BODY, count, AT_ONCE))


def _compared(setting: Setting, ask: Callable[[_Fleet, int], Coroutine[Any, Any, list[float]]]) -> Reading:
    fleets, count = setting.shared(_both), 50 if setting.quick else COUNT

    def all_of(fleet: _Fleet) -> float:
        started = time.perf_counter()
        clients.run(setting, ask(fleet, count))
        return time.perf_counter() - started

    sides = {"with": lambda: all_of(fleets.measured), "without": lambda: all_of(fleets.without)}
    samples = interleaved(setting.rounds if setting.quick else ROUNDS * setting.rounds, sides)
    floor = median(samples["without"]) / count * 1e6
    return Reading.of(ratios(samples["with"], samples["without"]), floor=floor, floor_unit="µs a request without")
