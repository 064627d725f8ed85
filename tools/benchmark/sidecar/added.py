"""The same requests at an upstream and through the sidecar in front of it, taking turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlctl.runtime import event_loops
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.rounds import Spread, interleaved, median
from tools.benchmark.servers import Servers, announced, cpu_s, post_all

PROMPT = [5 + i % 1000 for i in range(512)]
TOKENS = 128
MANY = 64

THROUGH = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0},
    "return_logprob": True,
}
STRAIGHT = {
    "token_ids": PROMPT,
    "request_id": "r",
    "output_mode": "text",
    "sampling_params": {"max_tokens": TOKENS, "temperature": 1.0, "logprobs": 0},
}


@dataclass(frozen=True)
class Pair:
    """Addresses of an upstream and of a process in front of the upstream.

    Attributes:
        straight, through: addresses to POST to.
        pid: process between the caller and the upstream.
    """

    straight: str
    through: str
    pid: int


@contextmanager
def running(setting: Setting) -> Iterator[Pair]:
    """Start an upstream and a sidecar, each a process."""
    del setting
    with Servers() as servers:
        address = announced(servers.start("tools.benchmark.sidecar.upstream"))
        command = ("sidecar", "vllm", "--upstream", address, "--coordinator", "nobody:1", "--log-level", "WARNING")
        sidecar = servers.start("rlctl", *command, "--end-with-parent")
        yield Pair(f"{address}/inference/v1/generate", f"{announced(sidecar)}/generate", sidecar.pid)


def latency_alone(setting: Setting) -> Reading:
    """Measure one request at a time: median through the sidecar less median straight, round by round."""
    return added_latency(setting, setting.shared(running), THROUGH)


def cpu_of_many(setting: Setting) -> Reading:
    """Measure the sidecar's CPU time per request, with 64 requests in flight."""
    return cpu_each(setting, setting.shared(running), THROUGH)


def added_latency(setting: Setting, pair: Pair, body: Mapping[str, Any]) -> Reading:
    """Measure one request at a time with this body through the process of a pair: median less median straight."""
    count = 30 if setting.quick else 300
    sides = {
        "straight": lambda: event_loops.run(post_all(pair.straight, STRAIGHT, count, 1)),
        "through": lambda: event_loops.run(post_all(pair.through, body, count, 1)),
    }
    took = interleaved(setting.rounds, sides)
    straight = [median(each) * 1000 for each in took["straight"]]
    through = [median(each) * 1000 for each in took["through"]]
    spread = Spread.of([a - b for a, b in zip(through, straight, strict=True)])
    return Reading.of(spread, floor=median(straight), floor_unit="ms", through_ms=median(through))


def cpu_each(setting: Setting, pair: Pair, body: Mapping[str, Any]) -> Reading:
    """Measure the CPU time per request of a pair's process, with 64 requests in flight."""
    count = 4 * MANY if setting.quick else 32 * MANY
    used = []
    for number in range(setting.rounds + 1):
        before = cpu_s(pair.pid)
        event_loops.run(post_all(pair.through, body, count, MANY))
        if number:
            used.append((cpu_s(pair.pid) - before) / count * 1000)
    return Reading.of(Spread.of(used), requests=count)
