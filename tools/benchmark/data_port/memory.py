"""Memory of stage and gateway: its growth over many requests, and over large bodies that the stage refuses."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from rlctl.runtime import event_loops
from tools.benchmark.data_port.added import Ways, running
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.servers import post_all
from tools.benchmark.sidecar.added import MANY, STRAIGHT

BODY_BYTES = 60_000_000
WARM = 10
"""Part of the requests, one in so many, that come before the first look at the memory."""


def of_requests(setting: Setting) -> Reading:
    """Measure over answered requests, 64 at a time."""
    body = {**STRAIGHT, "request_id": None}  # an id names one request
    return _grown(setting, 100_000, 1_000, lambda url, count: post_all(url, body, count, MANY))


def of_refused(setting: Setting) -> Reading:
    """Measure over bodies of 60 MB, one at a time, with a field that is not passed on."""
    return _grown(setting, 1_000, 1, _refused)


async def _refused(url: str, count: int) -> None:
    body = b'{"kv_transfer_params": {"a": 1}, "unheard_of": "%b"}' % (b"x" * BODY_BYTES)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session:
        for _ in range(count):
            async with session.post(url, data=body, headers=headers) as response:
                text = await response.text()
                if "kv_transfer_params" not in text:
                    raise RuntimeError(f"the body was not refused: {response.status} {text[:200]}")


def _grown(setting: Setting, full: int, quick: int, send: Callable[[str, int], Coroutine[Any, Any, object]]) -> Reading:
    ways, count = setting.shared(running), quick if setting.quick else full
    event_loops.run(send(ways.gateway.through, max(count // WARM, 1)))
    before = _resident_mib(ways)
    event_loops.run(send(ways.gateway.through, count))
    stage, gateway = (after - earlier for after, earlier in zip(_resident_mib(ways), before, strict=True))
    most = max(stage, gateway)
    return Reading(most, most, most, details={"stage_mib": stage, "gateway_mib": gateway, "requests": count})


def _resident_mib(ways: Ways) -> tuple[float, float]:
    """Return the resident memory of the stage's and the gateway's process."""
    return _resident(ways.port.pid), _resident(ways.gateway.pid)


def _resident(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024
