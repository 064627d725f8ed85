"""The paths to a torch engine with a tiny model: the SDK, and the gateway behind sglang-router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlctl.demo import tiny
from rlctl.sdk.blocking import connect
from tools.benchmark.figures import Setting
from tools.benchmark.rollout.ways import PROMPT
from tools.benchmark.servers import Servers

START_S = 120.0


@dataclass(frozen=True)
class TorchWays:
    """Addresses.

    Attributes:
        coordinator, stage: of the fleet; the stage's for generation.
        router: /generate of sglang-router, with the gateway as its router worker.
    """

    coordinator: str
    stage: str
    router: str


@contextmanager
def running(setting: Setting) -> Iterator[TorchWays]:
    """Start all servers, each a process."""
    directory = Path(setting.directory) / "torch"
    directory.mkdir(exist_ok=True)
    tiny.save(tiny.make(0), directory / "model")
    with Servers() as servers:
        coordinator = servers.coordinator(directory)
        engine = ("--engine", "torch", "--model-path", str(directory / "model"), "--coordinator", coordinator)
        servers.rlctl("stage", "--slot", "a", *engine)
        with connect(coordinator) as fleet:
            fleet.generate(PROMPT, max_new_tokens=1, timeout_s=START_S)  # waits until the stage serves
            (known,) = fleet.status().stages
        gateway = servers.rlctl("gateway", "--coordinator", coordinator, "--router-backend", "sglang-router")
        yield TorchWays(coordinator, known.registration.rollout_address, f"{gateway['router']}/generate")
