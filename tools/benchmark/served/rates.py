"""The same requests at a vLLM server, through the data port of its stage, and through a gateway, taking turns."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlctl.demo import tiny
from rlctl.runtime import event_loops
from tools.benchmark.figures import Reading, Setting
from tools.benchmark.rounds import interleaved, median, ratios
from tools.benchmark.servers import Servers, announced, post_all, told

PATH = "/inference/v1/generate"
MANY = 64
TOKENS = 32
REQUEST = {
    "token_ids": [1] + [4 + i % 12 for i in range(31)],
    "sampling_params": {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "logprobs": 0},
}


@dataclass(frozen=True)
class Ways:
    """Addresses of a vLLM server, of its stage's data port, and of a gateway.

    Attributes:
        socket: the server's Unix socket, for ``direct``.
    """

    socket: str
    direct: str
    port: str
    gateway: str


@contextmanager
def running(setting: Setting) -> Iterator[Ways]:
    """Start a coordinator, a stage with a vLLM server, and a gateway, each a process."""
    directory = setting.directory / "served"
    directory.mkdir(exist_ok=True)
    tiny.save(tiny.make(0), directory / "model")
    os.environ["TMPDIR"] = str(directory)  # the socket of the server is there
    with Servers() as servers:
        coordinator = servers.coordinator(directory)
        at = ("--coordinator", coordinator, "--log-level", "WARNING", "--end-with-parent")
        engine = ("--slot", "a", "--engine", "vllm", "--dtype", "float32", "--model-path", str(directory / "model"))
        data_address = told(servers.start("rlctl", "stage", *engine, *at))["data_address"]
        gateway = announced(servers.start("rlctl", "gateway", "--dialect", "vllm", *at))
        (socket,) = directory.glob("rlctl-vllm-*/http")
        yield Ways(str(socket), f"http://vllm{PATH}", f"http://{data_address}{PATH}", gateway + PATH)


def of_port(setting: Setting) -> Reading:
    """Measure requests a second through the data port ÷ at the server itself, round by round."""
    ways = setting.shared(running)
    return _ratio(setting, ways, ways.port)


def of_gateway(setting: Setting) -> Reading:
    """Measure requests a second through gateway and data port ÷ at the server itself, round by round."""
    ways = setting.shared(running)
    return _ratio(setting, ways, ways.gateway)


def _ratio(setting: Setting, ways: Ways, through: str) -> Reading:
    sides = {
        "direct": lambda: _rate(setting, ways.direct, ways.socket),
        "through": lambda: _rate(setting, through, ""),
    }
    rates = interleaved(setting.rounds, sides)
    spread = ratios(rates["through"], rates["direct"])
    return Reading.of(
        spread,
        floor=median(rates["direct"]),
        floor_unit="requests/s",
        through_requests_per_s=median(rates["through"]),
    )


def _rate(setting: Setting, url: str, socket: str) -> float:
    count = MANY if setting.quick else 8 * MANY
    started = time.perf_counter()
    event_loops.run(post_all(url, REQUEST, count, MANY, socket=socket))
    return count / (time.perf_counter() - started)
