"""Fifty updates of two real servers under load, while server, stage and gateway are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from models import changed
from port_load import (
    Ended,
    Versions,
    Words,
    at_engines,
    counted,
    keep_calling,
    update,
    wait_until_idle,
)
from yarl import URL

from rlctl.contract.errors import RlctlError
from rlctl.demo import tiny as tiny_
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.launch.interface.spec import GatewaySpec
from rlctl.sdk.blocking import Fleet
from rlctl.v1.common_pb2 import STAGE_STATE_READY

UPDATES = 50
KILLS = ("server of actor-0", "actor-1", "gateway-actor", "server of actor-1")
"""Processes to kill. The kill follows KILL_S after an update has begun."""
BETWEEN_KILLS = 11
"""Updates between two kills. No multiple of the number of pauses, so that the kills are under different pauses."""

KILL_S = 0.2
HEALED_S = 400.0
LEAVING = 6
"""Long requests through the gateway when it is killed at the end."""

POSITIONS = 16_384
LONG = 12_000
"""Tokens of a request that its caller closes early. To its end, it would run for 15 s or longer."""

ENDED = {
    *("length", "abort", "left", "lost"),
    *("STAGE_NOT_SERVING", "CANCELLED", "ENGINE_FAILED", "NO_ROUTABLE_STAGE", "LINK_LOST", "UNREACHABLE"),
}


def checkpoint_for_long(tiny: Any, directory: Path) -> Path:
    """Write the model with room for requests that do not end within the test. Return its directory."""
    tiny_.save(tiny, directory)
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": POSITIONS}))
    return directory


@dataclass
class Kill:
    """The kill of a process.

    Attributes:
        process: name of the process: of a stage, or of the gateway.
        before: identity of the process before the kill, see :meth:`Kept.identity`.
        at: when, on the monotonic clock.
        healed: when the fleet was complete again.
    """

    process: str
    before: int
    at: float
    healed: float = float("inf")


@dataclass
class Kept:
    """A fleet under supervision.

    Attributes:
        addresses: URLs by target: a slot's data port, or "gateway".
    """

    up: LaunchedFleet
    client: Fleet
    addresses: dict[str, str] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def supervise(self) -> None:
        """Restart what has ended, and note the addresses."""
        while not self.done.wait(0.3):
            self.up.look(restart=True)
            with contextlib.suppress(RlctlError):
                self.note()

    def note(self) -> None:
        ports = {stage.registration.slot: stage.registration.data_address for stage in self.client.status().stages}
        addresses = {slot: f"http://{port}" for slot, port in ports.items() if port}
        addresses |= dict(zip(["gateway"], self.up.gateways.addresses.values(), strict=False))
        self.addresses = addresses

    @property
    def ready(self) -> bool:
        self.note()
        stages = self.client.status().stages
        ready = len(self.addresses) == 3 and all(stage.state == STAGE_STATE_READY for stage in stages)
        return ready and _accepts(self.addresses["gateway"])

    def kill(self, what: str, product: str) -> None:
        """Kill a process, or the server below a stage's process."""
        stage = what.removeprefix("server of ")
        process = psutil.Process(self.up.process(stage).pid)
        if stage != what:
            (process,) = (child for child in process.children() if product in " ".join(child.cmdline()))
        self.kills.append(Kill(what, self.identity(stage), time.monotonic()))
        os.kill(process.pid, signal.SIGKILL)

    def identity(self, process: str) -> int:
        """Return the incarnation of a stage, or the process id of the gateway; 0 while it is absent.

        A restart changes both.
        """
        stages = {stage.registration.slot: stage.incarnation for stage in self.client.status().stages}
        pids = {each.name: each.pid for each in self.up.processes}
        return stages.get(process, 0) if process != "gateway-actor" else pids.get(process, 0)

    def heal(self) -> None:
        """Wait until the killed process has its successor, and the fleet is complete.

        A fleet is complete for a moment after the kill: the coordinator has not noticed the end of the process.
        """
        kill = self.kills[-1]
        stage = kill.process.removeprefix("server of ")
        until(lambda: self.ready and self.identity(stage) not in (0, kill.before))
        kill.healed = time.monotonic()

    def died(self, ended: Ended) -> bool:
        """Return whether the process that a request was sent to was killed before the request's end."""
        process = "gateway-actor" if ended.target == "gateway" else ended.target
        return any(kill.process == process and kill.at <= ended.at and ended.sent <= kill.healed for kill in self.kills)


@contextlib.contextmanager
def kept_fleet(
    engine: str, checkpoint: Path, directory: Path, options: Mapping[str, str], environment: Mapping[str, str]
) -> Iterator[Kept]:
    """Start two servers of a kind, their coordinator and a gateway, and restart what ends."""
    given = {"allowed_roots": str(checkpoint.parent), **options}
    engines = [
        EngineSpec(f"actor-{i}", str(checkpoint), engine=engine, options=given, environment=dict(environment))
        for i in range(2)
    ]
    gateway = GatewaySpec("actor", "127.0.0.1:0", tokenizer=str(checkpoint))
    with LaunchedFleet(engines, directory=directory, gateways=[gateway]) as up, up.connect() as client:
        kept = Kept(up, client)
        until(lambda: kept.ready)
        supervisor = threading.Thread(target=kept.supervise)
        supervisor.start()
        try:
            yield kept
        finally:
            kept.done.set()
            supervisor.join()


def _accepts(url: str) -> bool:
    """Return whether a server accepts connections."""
    address = URL(url)
    try:
        socket.create_connection((address.host, address.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, HEALED_S at most. Raises TimeoutError."""
    deadline = time.monotonic() + HEALED_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.3)


async def run(kept: Kept, words: Words, tiny: Any, pauses: Sequence[str], product: str) -> None:
    """Update under load and kill; check every answer, and that the engines have no request left."""
    first = kept.client.status().models[0].latest.label
    versions = Versions({first: tiny} | {f"step-{seed}": changed(tiny, seed=seed) for seed in range(UPDATES)}, pauses)
    victims = {(index + 1) * BETWEEN_KILLS: what for index, what in enumerate(KILLS)}
    assert len({number % len(pauses) for number in victims}) == len(pauses)

    def during(number: int) -> None:
        if number in victims:
            time.sleep(KILL_S)
            kept.kill(victims[number], product)

    def after(number: int) -> None:
        if number in victims:
            kept.heal()

    def updates() -> None:
        update(kept.client, versions, during=during, after=after, quorum=1, retries=2)

    ends = await keep_calling(words, versions, lambda: kept.addresses, updates, LONG)
    count = counted(ends)
    assert {how for _, how in count} <= ENDED, count
    assert [ended for ended in ends if ended.how == "lost" and not kept.died(ended)] == [], count
    for target in ("actor-0", "actor-1", "gateway"):
        assert count[target, "length"] >= UPDATES // 2, count
    for ended in ends:
        ended.check(versions)
    assert len({label for ended in ends for label, _, _ in ended.spans}) > UPDATES // 2
    until(lambda: kept.ready)
    wait_until_idle(kept.client)
    last = f"step-{UPDATES - 1}"
    assert [stage.report.weight_version.label for stage in kept.client.status().stages] == [last, last]
    await _leave(kept, words)


async def _leave(kept: Kept, words: Words) -> None:
    """Check that requests of a killed gateway end at the engines."""
    url = kept.addresses["gateway"] + words.path
    body = {**words.body(LONG), "stream": True}
    async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
        for _ in range(LEAVING):
            response = await stack.enter_async_context(session.post(url, json=body))
            assert await response.content.readany()
        assert sum(at_engines(kept.client).values()) == LEAVING
        kept.kill("gateway-actor", "")
        wait_until_idle(kept.client)
