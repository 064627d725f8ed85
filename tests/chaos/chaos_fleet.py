"""A fleet of processes whose links to the stages go through chaos proxies, its clients, and its trainers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from forking import NURSERY
from history import Generation, History, Token, Update

from rlctl.contract.errors import RlctlError
from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet
from rlctl.runtime.event_loops import LoopThread
from rlctl.sdk.aio import AsyncFleet
from rlctl.sdk.aio import connect as aconnect
from rlctl.testing.chaos_proxy import ChaosProxy
from rlctl.v1.fleet_pb2 import Fleet as FleetState

PROXY_HOST = "127.0.0.2"
"""Stages bind 127.0.0.1 and advertise this loopback address, at which a proxy listens on the same ports."""

TRAINER = Path(__file__).with_name("chaos_trainer.py")
GENERATE_S = 5.0
CLIENTS = 2


class ChaosFleet(LaunchedFleet):
    """``with ChaosFleet(engines, directory=path) as fleet``. Stages are reached through ``proxies`` only."""

    def __init__(self, engines: Sequence[EngineSpec], *, directory: Path) -> None:
        proxied = [dataclasses.replace(spec, advertise=PROXY_HOST) for spec in engines]
        super().__init__(proxied, directory=directory)
        self.proxies: dict[str, list[ChaosProxy]] = {}
        self._linked: dict[str, str] = {}
        self._network = LoopThread("network")
        self._linking = self._network.submit(self._keep_linked())

    def stop(self) -> None:
        for process in self.processes:
            self.signal(process.name, signal.SIGCONT)
        super().stop()
        self._linking.cancel()
        for slot in list(self.proxies):
            self._network.call(self._unlink(slot))
        self._network.stop()

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process, if it still runs."""
        process = self.process(name)
        if process.returncode is None:
            os.kill(process.pid, number)

    def revive(self, name: str) -> None:
        """Start again what was killed, as it was launched; an engine with all its ranks."""
        if name == "coordinator":
            self.restart_coordinator()
        else:
            self.restart(name.partition(".")[0])

    def network(self, slot: str, change: Callable[[ChaosProxy], None]) -> None:
        """Do something to the links of a stage."""

        async def apply() -> None:
            for proxy in self.proxies[slot]:
                change(proxy)

        self._network.call(apply())

    async def _keep_linked(self) -> None:
        """Stages have proxies as soon as they say where they are; a restarted one has others."""
        slots = [spec.slot for spec in self.engines]
        while True:
            for process in list(self.processes):
                facts = process.facts
                if process.name in slots and facts and self._linked.get(process.name) != facts["address"]:
                    self._linked[process.name] = facts["address"]
                    await self._relink(process.name, [facts["address"], facts["rollout_address"]])
            await asyncio.sleep(0.02)

    async def _relink(self, slot: str, advertised: Sequence[str]) -> None:
        await self._unlink(slot)
        for address in advertised:
            proxy = ChaosProxy(address.replace(PROXY_HOST, "127.0.0.1"), listen=address)
            await proxy.start()
            self.proxies.setdefault(slot, []).append(proxy)

    async def _unlink(self, slot: str) -> None:
        for proxy in self.proxies.pop(slot, []):
            await proxy.stop()


class Kept:
    """One fleet for one scenario after the other; the one after a scenario that fails gets another."""

    def __init__(self, make: Callable[[], ChaosFleet]) -> None:
        self._make = make
        self._running = contextlib.ExitStack()
        self._fleet: ChaosFleet | None = None

    @contextlib.contextmanager
    def fleet(self) -> Iterator[ChaosFleet]:
        if self._fleet is None:
            self._fleet = self._running.enter_context(self._make())
        try:
            yield self._fleet
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._fleet = None
        self._running.close()


class Clients:
    """``with Clients(fleet, history)``: requests one after another, recorded as they come."""

    def __init__(self, address: str, history: History) -> None:
        self._address = address
        self._history = history
        self._loop = LoopThread("clients")
        self._stopping = False

    def __enter__(self) -> None:
        self._running = self._loop.submit(self._run())

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._running.result(60)
        self._loop.stop()

    async def _run(self) -> None:
        fleet = await aconnect(self._address)
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(CLIENTS):
                    clients.create_task(self._client(fleet))
        finally:
            await fleet.close()

    async def _client(self, fleet: AsyncFleet) -> None:
        while not self._stopping:
            generation = Generation(time.monotonic(), GENERATE_S)
            self._history.generations.append(generation)
            try:
                stream = fleet.generate_stream([1, 2, 3], timeout_s=GENERATE_S, max_new_tokens=24, ignore_eos=True)
                async for response in stream:
                    generation.slot = response.slot
                    now = time.monotonic()
                    for sample in response.samples:
                        for span in sample.versions:
                            generation.tokens.append(Token(now, span.version.label, span.version.sequence))
            except RlctlError as error:
                generation.error = str(error)
                await asyncio.sleep(0.02)
            generation.ended = time.monotonic()


class Trainer:
    """A trainer's process; its updates are recorded as it tells of them."""

    def __init__(self, kind: str, address: str, history: History, labels: Sequence[str], deadline_s: float) -> None:
        self._history = history
        self._deadline_s = deadline_s
        argv = [str(TRAINER), kind, address, str(deadline_s), *labels]
        self._popen = NURSERY.script(argv, sys.stderr.buffer)
        self._updates: dict[str, Update] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def signal(self, number: int, *, source: bool = False) -> None:
        """Send a signal to the trainer, or to the process of it that sends the weights."""
        if source:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._source, number)
        elif self._popen.poll() is None:
            os.kill(self._popen.pid, number)

    @property
    def runs(self) -> bool:
        return self._popen.poll() is None

    @property
    def updates(self) -> list[Update]:
        """What it has told of so far."""
        return list(self._updates.values())

    def has_begun(self, label: str) -> bool:
        return label in self._updates

    def wait(self, timeout_s: float) -> list[Update]:
        """Its updates, once it has ended. One that does not end in time is killed, which raises TimeoutExpired."""
        try:
            self._popen.wait(timeout_s)
        finally:
            self._popen.kill()
            self._popen.wait()
            self._reader.join()
            self._popen.close()
        return self.updates

    def _read(self) -> None:
        for line in self._popen.stdout:
            facts: dict[str, Any] = json.loads(line)
            if "source" in facts:
                self._source = facts["source"]
                continue
            if label := facts.get("begun"):
                update = self._updates[label] = Update(label, facts["time"], self._deadline_s)
                self._history.updates.append(update)
                continue
            update = self._updates[facts["ended"]]
            update.state, update.sequence, update.error = facts["state"], facts.get("sequence", 0), facts["error"]
            update.ranks, update.excluded = facts.get("ranks", {}), facts.get("excluded", ())
            update.ended = facts["time"]


def until(fleet: LaunchedFleet, condition: Callable[[FleetState], bool], timeout_s: float, what: str) -> FleetState:
    """Wait until the fleet is as wanted."""
    deadline = time.monotonic() + timeout_s
    state = FleetState()
    while time.monotonic() < deadline:
        try:
            with fleet.connect() as client, closing(client.watch()) as events:
                for _ in events:
                    state = client.status()
                    if condition(state):
                        return state
                    if time.monotonic() > deadline:
                        break
        except RlctlError:
            time.sleep(0.05)  # the coordinator is away
    raise AssertionError(f"not {what} after {timeout_s:g} s:\n{state}")
