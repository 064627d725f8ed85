"""The same requests at an upstream and through a data port in front of it, taking turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rlctl.runtime import event_loops
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.rounds import Spread, interleaved, median
from tools.benchmark.servers import announced, cpu_s, post_all, server
from tools.benchmark.sidecar.added import MANY, STRAIGHT, Pair


@contextmanager
def running(setting: Setting) -> Iterator[Pair]:
    """An upstream and a data port, each a process."""
    del setting
    with ExitStack() as stack:
        upstream = stack.enter_context(server([sys.executable, "-m", "tools.benchmark.sidecar.upstream"]))
        address = announced(upstream)
        port = stack.enter_context(server([sys.executable, "-m", "tools.benchmark.data_port.port", address]))
        path = "/inference/v1/generate"
        yield Pair(address + path, announced(port) + path, port.pid)


def latency_alone(setting: Setting) -> Reading:
    """One request at a time: median through the port less median straight, round by round."""
    pair = setting.shared(running)
    count = 30 if setting.quick else 300
    sides = {
        "straight": lambda: event_loops.run(post_all(pair.straight, STRAIGHT, count, 1)),
        "through": lambda: event_loops.run(post_all(pair.through, STRAIGHT, count, 1)),
    }
    took = interleaved(setting.rounds, sides)
    straight = [median(each) * 1000 for each in took["straight"]]
    through = [median(each) * 1000 for each in took["through"]]
    spread = Spread.of([a - b for a, b in zip(through, straight, strict=True)])
    return Reading.of(spread, floor=median(straight), floor_unit="ms", through_ms=median(through))


def cpu_of_many(setting: Setting) -> Reading:
    """CPU time of the port while 64 requests are under way at any time, by request."""
    pair = setting.shared(running)
    count = 4 * MANY if setting.quick else 32 * MANY
    body = {name: value for name, value in STRAIGHT.items() if name != "request_id"}  # which is one request's only
    used = []
    for number in range(setting.rounds + 1):
        before = cpu_s(pair.pid)
        event_loops.run(post_all(pair.through, {**body, "request_id": None}, count, MANY))
        if number:
            used.append((cpu_s(pair.pid) - before) / count * 1000)
    return Reading.of(Spread.of(used), requests=count)
