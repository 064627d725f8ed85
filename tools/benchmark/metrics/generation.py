"""Generation with and without metrics.

stage_streams and gateway_requests have an engine that answers at once, torch_streams and torch_requests the torch
engine with a tiny model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.demo import tiny
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

TORCH_ROUNDS = 4
"""A round takes several times as long as one of an engine that answers at once."""

START_S = 120.0


@dataclass(frozen=True)
class _Fleet:
    """Addresses: the coordinator's, the gateway's /generate, and all metrics addresses."""

    coordinator: str
    generate: str
    metrics: tuple[str, ...]


@contextmanager
def _fleet(directory: Path, engine: str, options: list[str]) -> Iterator[_Fleet]:
    directory.mkdir(exist_ok=True)
    with Servers() as servers:
        journal = str(directory / "journal.db")
        coordinator = servers.rlctl("coordinator", "--journal", journal, *options)
        at = ("--coordinator", str(coordinator["address"]), *options)
        if engine == "torch":
            tiny.save(tiny.make(0), directory / "model")
            module = "rlctl"
        else:
            (directory / "model").mkdir(exist_ok=True)
            (directory / "model" / "weights.txt").write_text("light")
            module = "tools.benchmark.rollout.light"
        model = ("--engine", engine, "--model-path", str(directory / "model"))
        stage = servers.rlctl("stage", "--slot", "a", *model, *at, module=module)
        gateway = servers.rlctl("gateway", *at)
        with connect(coordinator["address"]) as fleet:
            fleet.generate(PROMPT, max_new_tokens=1, timeout_s=START_S)  # waits until the stage serves
        started = (coordinator, stage, gateway)
        metrics = tuple(str(each["metrics_address"]) for each in started if "metrics_address" in each)
        yield _Fleet(str(coordinator["address"]), f"{gateway['address']}/generate", metrics)


@dataclass(frozen=True)
class _Fleets:
    measured: _Fleet
    without: _Fleet


@contextmanager
def _both(setting: Setting, engine: str) -> Iterator[_Fleets]:
    with (
        _fleet(setting.directory / f"{engine}-with", engine, ["--metrics", "127.0.0.1:0"]) as measured,
        _fleet(setting.directory / f"{engine}-without", engine, []) as without,
        scraped(measured.metrics),
    ):
        yield _Fleets(measured, without)


def _light(setting: Setting) -> AbstractContextManager[_Fleets]:
    return _both(setting, "fake")


def _torch(setting: Setting) -> AbstractContextManager[_Fleets]:
    return _both(setting, "torch")


def streams(setting: Setting) -> Reading:
    """Measure streams of the SDK."""
    return _compared(setting, _light, ROUNDS, _streams)


def requests(setting: Setting) -> Reading:
    """Measure SGLang's /generate."""
    return _compared(setting, _light, ROUNDS, _requests)


def torch_streams(setting: Setting) -> Reading:
    """Measure streams of the SDK from the torch engine. Its messages may have several tokens."""
    return _compared(setting, _torch, TORCH_ROUNDS, partial(_streams, joined=True))


def torch_requests(setting: Setting) -> Reading:
    """Measure SGLang's /generate with the torch engine."""
    return _compared(setting, _torch, TORCH_ROUNDS, _requests)


def _streams(fleet: _Fleet, count: int, *, joined: bool = False) -> Coroutine[Any, Any, list[float]]:
    return clients.sdk_streams(fleet.coordinator, count, AT_ONCE, joined=joined)


def _requests(fleet: _Fleet, count: int) -> Coroutine[Any, Any, list[float]]:
    return post_all(fleet.generate, BODY, count, AT_ONCE)


def _compared(
    setting: Setting,
    fleets: Callable[[Setting], AbstractContextManager[_Fleets]],
    rounds: int,
    ask: Callable[[_Fleet, int], Coroutine[Any, Any, list[float]]],
) -> Reading:
    both, count = setting.shared(fleets), 50 if setting.quick else COUNT

    def all_of(fleet: _Fleet) -> float:
        started = time.perf_counter()
        clients.run(setting, ask(fleet, count))
        return time.perf_counter() - started

    sides = {"with": lambda: all_of(both.measured), "without": lambda: all_of(both.without)}
    samples = interleaved(setting.rounds if setting.quick else rounds * setting.rounds, sides)
    floor = median(samples["without"]) / count * 1e6
    return Reading.of(ratios(samples["with"], samples["without"]), floor=floor, floor_unit="µs a request without")
