"""Fifty updates of two real SGLang servers under load, while server, stage and gateway are killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from models import changed, greedy
from test_sglang_ports_fleet import PROMPT, TOKENS, check

from rlctl.contract.errors import RlctlError
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.launch.interface.spec import GatewaySpec
from rlctl.runtime.http_errors import REASON
from rlctl.sdk.blocking import Fleet
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import STAGE_STATE_READY

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(1500)]

UPDATES = 50
PAUSES = ("abort", "retract")
KILLS = {8: "server of actor-0", 20: "actor-1", 32: "gateway-actor", 40: "server of actor-1"}
"""Processes to kill, by the number of the update. The kill follows 0.2 s after the begin."""

CALLERS = 6
BETWEEN_S = 0.3
HEALED_S = 240.0
ENDED = {
    "200",
    "broken",
    "error event",
    "STAGE_NOT_SERVING",
    "CANCELLED",
    "ENGINE_FAILED",
    "NO_ROUTABLE_STAGE",
    "LINK_LOST",
}
"""Ends of a request to a running process: a whole answer, a broken stream, an event with an error, or a reason."""


@dataclass
class Kept:
    """A fleet under supervision.

    Attributes:
        addresses: URLs by target: a slot's data port, or "gateway".
        lost: connections that ended without an answer, by target.
    """

    up: LaunchedFleet
    client: Fleet
    addresses: dict[str, str] = field(default_factory=dict)
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    answers: list[list[dict[str, Any]]] = field(default_factory=list)
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
        return len(self.addresses) == 3 and all(stage.state == STAGE_STATE_READY for stage in stages)

    def kill(self, what: str) -> None:
        stage = what.removeprefix("server of ")
        process = psutil.Process(self.up.process(stage).pid)
        if stage != what:
            (process,) = (child for child in process.children() if "sglang" in " ".join(child.cmdline()))
        os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
def kept(sglang: str, tiny: tuple[Any, Path], tmp_path: Path) -> Iterator[Kept]:
    options = {"allowed_roots": str(tiny[1].parent.parent)}
    engines = [EngineSpec(f"actor-{i}", str(tiny[1]), engine="sglang", options=options) for i in range(2)]
    gateway = GatewaySpec("actor", "127.0.0.1:0", tokenizer=str(tiny[1]))
    with LaunchedFleet(engines, directory=tmp_path / "fleet", gateways=[gateway]) as up, up.connect() as client:
        kept = Kept(up, client)
        until(lambda: kept.ready)
        supervisor = threading.Thread(target=kept.supervise)
        supervisor.start()
        try:
            yield kept
        finally:
            kept.done.set()
            supervisor.join()


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + HEALED_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.3)


def update(kept: Kept, models: dict[str, Any]) -> None:
    """Publish each version, and kill what the table says."""
    with contextlib.closing(kept.client.publisher("actor", trainer="port")) as publisher:
        for number, ((label, model), pause) in enumerate(zip(models.items(), itertools.cycle(PAUSES), strict=False)):
            victim = KILLS.get(number)
            pending = publisher.update_async(model, version=label, pause=pause, quorum=1, retries=2)
            if victim is not None:
                time.sleep(0.2)
                kept.kill(victim)
            pending.wait()
            if victim is not None:
                until(lambda: kept.ready)
            time.sleep(BETWEEN_S)


async def call(kept: Kept, session: aiohttp.ClientSession, target: str, *, stream: bool) -> None:
    """Send one request and note its end."""
    body = {
        "input_ids": PROMPT,
        "stream": stream,
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
    }
    try:
        async with session.post(f"{kept.addresses[target]}/generate", json=body) as response:
            if response.status != 200:
                kept.ended[target, response.headers.get(REASON, f"{response.status} without a reason")] += 1
                return
            parts = await response.read()
    except aiohttp.ClientPayloadError:
        kept.ended[target, "broken"] += 1
        return
    except (aiohttp.ClientConnectionError, ConnectionError):
        kept.lost[target] += 1
        await asyncio.sleep(0.2)
        return
    lines = [line.removeprefix(b"data: ") for line in parts.splitlines() if line]
    if stream and lines[-1] != b"[DONE]":
        assert "error" in json.loads(lines[-1]), lines[-1]
        kept.ended[target, "error event"] += 1
        return
    kept.ended[target, "200"] += 1
    kept.answers.append([json.loads(line) for line in (lines[:-1] if stream else [parts])])


async def test_no_answer_is_stale_or_lost_while_processes_die(kept: Kept, tiny: tuple[Any, Path]) -> None:
    models = {f"step-{number}": changed(tiny[0], seed=number) for number in range(UPDATES)}
    first = kept.client.status().models[0].latest.label
    expected = {label: greedy(model, PROMPT, TOKENS) for label, model in {first: tiny[0], **models}.items()}
    updating = asyncio.create_task(asyncio.to_thread(update, kept, models))

    async def keep_calling(number: int) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
            for turn in itertools.count(number):
                if updating.done():
                    return
                target = ("actor-0", "actor-1", "gateway")[turn % 3]
                if target in kept.addresses:
                    await call(kept, session, target, stream=turn % 2 == 0)
                else:
                    await asyncio.sleep(0.2)

    await asyncio.gather(*map(keep_calling, range(CALLERS)))
    await updating
    assert {how for _, how in kept.ended} <= ENDED, kept.ended
    assert set(kept.lost) <= {"actor-1", "gateway"}, kept.lost  # the stage of actor-0 lived all the time
    for target in ("actor-0", "actor-1", "gateway"):
        assert kept.ended[target, "200"] >= UPDATES // 2, kept.ended
    for events in kept.answers:
        check(events, expected, exact=True)
    until(lambda: kept.ready)
    for stage in kept.client.call(v.GetLoadsRequest()).stage_results:
        assert stage.rank_results[0].loads.running == 0
    last = f"step-{UPDATES - 1}"
    assert [stage.report.weight_version.label for stage in kept.client.status().stages] == [last, last]
