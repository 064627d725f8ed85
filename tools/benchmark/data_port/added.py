"""The same requests at an upstream, through the data port of a stage, and through a gateway, taking turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tools.benchmark.figures import Reading, Setting
from tools.benchmark.servers import Servers, announced, told
from tools.benchmark.sidecar.added import STRAIGHT, Pair, added_latency, cpu_each

PATH = "/inference/v1/generate"


@dataclass(frozen=True)
class Ways:
    """An upstream with a data port, and the same upstream with a gateway and the data port."""

    port: Pair
    gateway: Pair


@contextmanager
def running(setting: Setting) -> Iterator[Ways]:
    """Start an upstream, a coordinator, a stage with a data port and a gateway, each a process."""
    directory = setting.directory / "data_port"
    directory.mkdir(exist_ok=True)
    (directory / "weights.txt").write_text("light")
    with Servers() as servers:
        upstream = announced(servers.start("tools.benchmark.sidecar.upstream"))
        coordinator = servers.coordinator(directory)
        at = ("--coordinator", coordinator, "--log-level", "WARNING", "--end-with-parent")
        engine = ("--slot", "a", "--engine", "fake", "--model-path", str(directory))
        stage = servers.start("tools.benchmark.data_port.stage", upstream, "stage", *engine, *at)
        port = f"http://{told(stage)['data_address']}"
        gateway = servers.start("rlctl", "gateway", "--dialect", "vllm", *at)
        straight = upstream + PATH
        yield Ways(
            Pair(straight, port + PATH, stage.pid),
            Pair(straight, announced(gateway) + PATH, gateway.pid),
        )


def latency_alone(setting: Setting) -> Reading:
    """Measure one request at a time: median through the data port less median straight, round by round."""
    return added_latency(setting, setting.shared(running).port, STRAIGHT)


def latency_of_both(setting: Setting) -> Reading:
    """Measure one request at a time: median through gateway and data port less median straight, round by round."""
    return added_latency(setting, setting.shared(running).gateway, STRAIGHT)


def cpu_of_many(setting: Setting) -> Reading:
    """Measure the CPU time per request of the stage's process, with 64 requests in flight."""
    return cpu_each(setting, setting.shared(running).port, {**STRAIGHT, "request_id": None})  # an id names one request
