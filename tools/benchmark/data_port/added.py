"""The same requests at an upstream and through a data port in front of it, taking turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tools.benchmark.figures import Reading, Setting
from tools.benchmark.servers import Servers, announced
from tools.benchmark.sidecar.added import STRAIGHT, Pair, added_latency, cpu_each


@contextmanager
def running(setting: Setting) -> Iterator[Pair]:
    """Start an upstream and a data port, each a process."""
    del setting
    with Servers() as servers:
        address = announced(servers.start("tools.benchmark.sidecar.upstream"))
        port = servers.start("tools.benchmark.data_port.port", address)
        path = "/inference/v1/generate"
        yield Pair(address + path, announced(port) + path, port.pid)


def latency_alone(setting: Setting) -> Reading:
    """Measure one request at a time: median through the data port less median straight, round by round."""
    return added_latency(setting, setting.shared(running), STRAIGHT)


def cpu_of_many(setting: Setting) -> Reading:
    """Measure the data port's CPU time per request, with 64 requests in flight."""
    return cpu_each(setting, setting.shared(running), {**STRAIGHT, "request_id": None})  # an id names one request only
