"""The paths to servers that answer at once; all servers are processes that run at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlctl.gateway.router.process import LOOK_S, REGULAR, SglangRouter
from rlctl.sdk.blocking import connect
from tools.benchmark.figures import Setting
from tools.benchmark.rollout.reply import TOKENS
from tools.benchmark.servers import Servers, announced

PROMPT = [4 + i % 12 for i in range(32)]  # also in the tiny model's vocabulary
SAMPLING = {"max_new_tokens": len(TOKENS), "temperature": 1.0, "ignore_eos": True}
BODY = {"input_ids": PROMPT, "sampling_params": SAMPLING}
STREAM = {**BODY, "stream": True}


@dataclass(frozen=True)
class Ways:
    """Addresses.

    Attributes:
        coordinator, stage: of the fleet; the stage's for generation.
        direct: /generate of the HTTP server.
        router: /generate of sglang-router in front of the HTTP server.
        gateway: /generate of the gateway in front of the fleet.
    """

    coordinator: str
    stage: str
    direct: str
    router: str
    gateway: str


@contextmanager
def running(setting: Setting) -> Iterator[Ways]:
    """Start all servers."""
    directory = Path(setting.directory) / "ways"
    directory.mkdir(exist_ok=True)
    (directory / "weights.txt").write_text("light")
    with Servers() as servers:
        coordinator = servers.coordinator(directory)
        engine = ("--engine", "fake", "--model-path", str(directory), "--coordinator", coordinator)
        servers.rlctl("stage", "--slot", "a", *engine, module="tools.benchmark.rollout.light")
        backend = announced(servers.start("tools.benchmark.rollout.backend"))
        router = servers.enter_context(SglangRouter(policy="round_robin", log=directory / "router.log"))
        while not router.towards({backend: REGULAR})[0]:
            time.sleep(LOOK_S)
        gateway = servers.rlctl("gateway", "--coordinator", coordinator)["address"]
        with connect(coordinator) as fleet:
            fleet.generate(PROMPT, max_new_tokens=1, timeout_s=30.0)  # waits until the stage serves
            (known,) = fleet.status().stages
        yield Ways(
            coordinator,
            known.registration.rollout_address,
            f"{backend}/generate",
            f"{router.url}/generate",
            f"{gateway}/generate",
        )
