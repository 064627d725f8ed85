"""Requests a second, each way."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from rlctl.bench.figures import Reading, Setting
from rlctl.bench.rollout import clients
from rlctl.bench.rollout.ways import BODY, Ways, running
from rlctl.bench.rounds import interleaved, median, ratios
from rlctl.bench.servers import post_all

MANY = 64
_Client = Callable[[Ways, int, int], Coroutine[Any, Any, object]]


def sdk_alone(setting: Setting) -> Reading:
    """The SDK, one request at a time."""
    return _against_router(setting, lambda ways, count, at_once: clients.sdk(ways.coordinator, count, at_once), 1)


def sdk(setting: Setting) -> Reading:
    """The SDK."""
    return _against_router(setting, lambda ways, count, at_once: clients.sdk(ways.coordinator, count, at_once), MANY)


def gateway(setting: Setting) -> Reading:
    """The gateway, one process."""
    return _against_router(setting, lambda ways, count, at_once: post_all(ways.gateway, BODY, count, at_once), MANY)


def _against_router(setting: Setting, ours: _Client, at_once: int) -> Reading:
    ways = setting.shared(running)
    count = 4 * MANY if setting.quick else 2000 if at_once == 1 else 64 * MANY

    def rate(ask: _Client) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            clients.run(setting, ask(ways, count, at_once))
            return count / (time.perf_counter() - began)

        return run

    sides = {
        "ours": rate(ours),
        "router": rate(lambda ways, count, at_once: post_all(ways.router, BODY, count, at_once)),
        "direct": rate(lambda ways, count, at_once: post_all(ways.direct, BODY, count, at_once)),
    }
    rates = interleaved(setting.rounds, sides)
    spread = ratios(rates["ours"], rates["router"])
    details = {"ours_rps": median(rates["ours"]), "direct_rps": median(rates["direct"])}
    return Reading.of(spread, floor=median(rates["router"]), floor_unit="requests/s", **details)
