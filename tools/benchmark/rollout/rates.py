"""Requests a second, by path."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from tools.benchmark.figures import Reading, Setting
from tools.benchmark.rollout import clients
from tools.benchmark.rollout.torch_ways import running as torch_running
from tools.benchmark.rollout.ways import BODY, STREAM, Ways, running
from tools.benchmark.rounds import interleaved, median, ratios
from tools.benchmark.servers import post_all

MANY = 64
_Client = Callable[[int, int], Coroutine[Any, Any, object]]
"""(number of requests, number at a time)"""


def sdk_alone(setting: Setting) -> Reading:
    """Measure the SDK, one request at a time."""
    return _on_light(setting, _sdk, 1)


def sdk(setting: Setting) -> Reading:
    """Measure the SDK."""
    return _on_light(setting, _sdk, MANY)


def streams(setting: Setting) -> Reading:
    """Measure the SDK's streams."""
    return _on_light(setting, lambda ways: partial(clients.sdk_streams, ways.coordinator), MANY, body=STREAM)


def gateway(setting: Setting) -> Reading:
    """Measure the gateway, one process."""
    return _on_light(setting, lambda ways: partial(post_all, ways.gateway, BODY), MANY)


def torch_alone(setting: Setting) -> Reading:
    """Measure the SDK on the torch engine, one request at a time."""
    return _on_torch(setting, 1)


def torch(setting: Setting) -> Reading:
    """Measure the SDK on the torch engine."""
    return _on_torch(setting, MANY)


def _sdk(ways: Ways) -> _Client:
    return partial(clients.sdk, ways.coordinator)


def _on_light(
    setting: Setting, ours: Callable[[Ways], _Client], at_once: int, *, body: Mapping[str, Any] = BODY
) -> Reading:
    ways = setting.shared(running)
    sides: dict[str, _Client] = {
        "ours": ours(ways),
        "router": partial(post_all, ways.router, body),
        "direct": partial(post_all, ways.direct, body),
    }
    return _against_router(setting, sides, 2000 if at_once == 1 else 64 * MANY, at_once)


def _on_torch(setting: Setting, at_once: int) -> Reading:
    ways = setting.shared(torch_running)
    sides: dict[str, _Client] = {
        "ours": partial(clients.sdk, ways.coordinator),
        "router": partial(post_all, ways.router, BODY),
        "bare": partial(clients.bare, ways.stage, stream=True),
    }
    return _against_router(setting, sides, (8 if setting.quick else 40) if at_once == 1 else 4 * MANY, at_once)


def _against_router(setting: Setting, sides: Mapping[str, _Client], count: int, at_once: int) -> Reading:
    """Return requests a second of "ours" ÷ of "router"; the rates of the other sides are details."""
    count = min(count, 4 * MANY) if setting.quick else count

    def rate(ask: _Client) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            clients.run(setting, ask(count, at_once))
            return count / (time.perf_counter() - began)

        return run

    rates = interleaved(setting.rounds, {name: rate(ask) for name, ask in sides.items()})
    details = {f"{name}_rps": median(each) for name, each in rates.items() if name != "router"}
    return Reading.of(
        ratios(rates["ours"], rates["router"]), floor=median(rates["router"]), floor_unit="requests/s", **details
    )
