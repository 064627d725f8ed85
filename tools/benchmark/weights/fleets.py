"""Real fleets to measure: coordinator, torch engines and the SDK's publisher, each in separate processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.launch.interface.launcher import Launched
from rlctl.sdk.blocking import Fleet
from rlctl.trainer.publisher import Publisher
from rlctl.trainer.update_result import UpdateResult
from tools.benchmark.figures import Setting
from tools.benchmark.weights import member
from tools.benchmark.weights.peers import Peers
from tools.benchmark.weights.shapes import ONE_LAYER, QWEN3_0_6B, Shape, Synthetic, save

OPTIONS = {"max_total_tokens": "256", "max_running": "4"}
"""No requests run, so the KV cache is small."""


@dataclass
class Running:
    """A running fleet with this process as its trainer.

    Attributes:
        client: the SDK.
        publisher: sends the weights.
        source: the weights.
        checkpoint: directory of the engines' initial checkpoint, with the same weights.
        engines: the processes of the engines' ranks.
        peers: the same processes as an ordinary torch.distributed group.
    """

    client: Fleet
    publisher: Publisher
    source: Synthetic
    checkpoint: str
    engines: list[Launched]
    peers: Peers
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def update(self, weights: Any = None, publisher: Publisher | None = None, **settings: Any) -> Update:
        """Run an update of the source's weights (or of ``weights``), without verification unless ``settings`` ask."""
        watched = {"verify": "none", "decode_check": False, **settings}
        started = time.perf_counter()
        pending = (publisher or self.publisher).update_async(
            self.source if weights is None else weights, version=f"bench-{next(self._numbers)}", **watched
        )
        pending.wait_sent()
        sent_s = time.perf_counter() - started
        result = pending.wait()
        return Update(result, sent_s, time.perf_counter() - started)


@dataclass(frozen=True)
class Update:
    """An update.

    Attributes:
        result: the publisher's result.
        sent_s: from the call until the source's tensors may be overwritten, seconds.
        total_s: from the call to its return: begin to resumed, seconds.
    """

    result: UpdateResult
    sent_s: float
    total_s: float


@contextlib.contextmanager
def running(
    setting: Setting, shape: Shape, *, engines: int, tp_size: int = 1, device: str = "cpu"
) -> Iterator[Running]:
    """Run torch engines with a model of this shape, and its trainer; the only running fleet of the benchmark."""
    setting.close()
    source = Synthetic(shape, device)
    root = setting.directory / f"fleet-{time.monotonic_ns()}"
    members = root / "members"
    members.mkdir(parents=True)
    checkpoint = str(save(shape, source.weights, root / "checkpoint"))
    environment = {member.DIRECTORY: str(members), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    specs = [
        EngineSpec(f"actor-{i}", checkpoint, tp_size=tp_size, device=device, options=OPTIONS) for i in range(engines)
    ]
    with _environment(environment), contextlib.ExitStack() as stack:
        fleet = LaunchedFleet(specs, directory=root / "fleet", module=member.__name__)
        stack.enter_context(fleet)
        ranks = [process for process in fleet.processes if process.name != "coordinator"]
        peers = Peers(members, [process.pid for process in ranks])
        stack.callback(peers.close)
        client = stack.enter_context(fleet.connect())
        publisher = client.publisher("actor")
        stack.callback(publisher.close)
        setting.say(f"fleet of {engines} engines, TP {tp_size}, {source.nbytes / 2**30:.2f} GiB of weights")
        yield Running(client, publisher, source, checkpoint, ranks, peers)


def single(setting: Setting) -> contextlib.AbstractContextManager[Running]:
    """Return a shared fleet with one engine of one rank."""
    return running(setting, model(setting), engines=1)


def model(setting: Setting) -> Shape:
    """Return the shape of the measured model."""
    return ONE_LAYER if setting.quick else QWEN3_0_6B


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for child processes, and for gloo in this process."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
