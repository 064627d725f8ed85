"""One seed: a fleet of processes, what is asked of it, what befalls it, and what must be true in the end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, fields
from typing import Any

from rlctl.coordinator.operations import RETAINED
from rlctl.coordinator.roster import Slot
from rlctl.errors import Reason, RlctlError
from rlctl.ports import Delete, Put
from rlctl.simulation.clients import Client, Operator
from rlctl.simulation.curious import Curious
from rlctl.simulation.engine import LEVELS
from rlctl.simulation.fabric import Fabric, Tensors
from rlctl.simulation.faults import WORK_S, Faults
from rlctl.simulation.holding import contents
from rlctl.simulation.hosts import CoordinatorHost, StageHost
from rlctl.simulation.journal import Store
from rlctl.simulation.nameless import Nameless
from rlctl.simulation.network import Network
from rlctl.simulation.observer import Observer
from rlctl.simulation.trainer import Trainer
from rlctl.simulation.world import Node, World
from rlctl.v1.common_pb2 import (
    STAGE_STATE_ASLEEP,
    STAGE_STATE_PAUSED,
    STAGE_STATE_READY,
    StageState,
)

SETTLE_S = 400.0
"""Time for the fleet to recover once the faults have stopped: longer than a heal may take."""

LOOK_S = 1.0

LEASE_S = 10.0

NAMELESS_EVERY, NAMELESS_AT = 7, 3
"""Which seeds have trainers that name no update: what those leave behind keeps the others from most of theirs."""


@dataclass
class Counts:
    """What a seed consisted of."""

    stages: int = 0
    operations: int = 0
    faults: int = 0
    tokens: int = 0
    messages: int = 0
    turns: int = 0
    virtual_seconds: float = 0.0
    quarantined: int = 0
    unhealable: int = 0

    def add(self, other: Counts) -> None:
        """Take in what another seed consisted of."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


@dataclass
class Simulation:
    """The world of one seed.

    Attributes:
        off: safeguards that are turned off.
        dropped: keys of steps that are left out, to find those that a failure needs.
        telling: a history is kept.
        published: what each version of a model is made of, by model and sequence.
        adapters: what each adapter is made of, by model, name and version.
        digested: updates whose trainers say which digest is right.
        compared: partial updates whose targets are compared with each other.
        kinds: what each slot's engine can verify.
        retained: ended operations that a coordinator remembers.
        nameless: every tensor that a trainer has sent that names no update.
        keys: what callers' own keys stood for when they came first.
    """

    seed: int
    off: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    telling: bool = False
    published: dict[tuple[str, int], Tensors] = field(default_factory=dict)
    adapters: dict[tuple[str, str, str], Tensors] = field(default_factory=dict)
    digested: set[str] = field(default_factory=set)
    compared: set[str] = field(default_factory=set)
    disks: dict[str, Tensors] = field(default_factory=dict)
    models: dict[str, list[str]] = field(default_factory=dict)
    stages: dict[str, StageHost] = field(default_factory=dict)
    lease_s: float = LEASE_S
    kinds: dict[str, str] = field(default_factory=dict)
    retained: int = RETAINED
    nameless: set[str] = field(default_factory=set)
    keys: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.network = Network(self.world)
        self.fabric = Fabric(self.world)
        self.store = Store()
        self.observer = Observer(self)
        self.faults = Faults(self)
        self.store.watch = self._journaled
        self.counts = Counts()
        self.timer: Node = self.world.spawn("time")
        self._boots = 0
        self._coordinators = 0
        self.ranks: dict[str, int] = {}
        self.steps: list[str] = []
        """Keys of what was drawn: see :meth:`step`."""
        self.coordinator: CoordinatorHost

    def broken(self, safeguard: str) -> bool:
        """Whether a safeguard is turned off in this run."""
        return safeguard in self.off

    def slots_of(self, model: str) -> list[str]:
        """Slots of a model."""
        return self.models[model]

    # Processes.

    def start_coordinator(self) -> None:
        """Start a coordinator on the journal."""
        self._coordinators += 1
        self.coordinator = CoordinatorHost(self, f"coordinator-{self._coordinators}/0")

    def start_stage(self, slot: str) -> None:
        """Fill a slot anew."""
        model = next(model for model, slots in self.models.items() if slot in slots)
        self._boots += 1
        self.stages[slot] = StageHost(self, slot, model, self.ranks[slot], f"{model}-initial", self._boots)

    def add_stage(self, model: str, ranks: int) -> None:
        """Fill a slot that there has not been yet."""
        slot = f"{model}-{sum(other.startswith(model) for other in self.ranks)}"
        self.kinds[slot] = self.world.chance(f"kind of {slot}").choices([*LEVELS], (6, 2, 1, 1))[0]
        self.models[model].append(slot)
        self.ranks[slot] = ranks
        self.counts.stages += 1
        self.start_stage(slot)

    def remove_stage(self, slot: str) -> None:
        """Empty a slot for good, if the coordinator can be told."""
        host = self.stages.pop(slot)
        self.models[host.model].remove(slot)
        host.node.start(host.leave())

    def _journaled(self, change: Put | Delete) -> None:
        self.observer.journaled(change)
        self.faults.wrote(change)

    # A seed.

    def step(self, key: str, do: Callable[[random.Random], object], *, fault: bool = False) -> None:
        """Do something that can be left out. What it draws depends on nothing but the seed and its key."""
        self.steps.append(key)
        if key not in self.dropped:
            self.counts.faults += fault
            do(self.world.chance(key))

    def run(self) -> None:
        """All of it."""
        chance, world = self.world.chance("fleet"), self.world
        self.retained = self.world.chance("retained").choice((RETAINED, RETAINED, 25))
        for model in ("actor", "critic")[: chance.randint(1, 2)]:
            self.disks[f"{model}-initial"] = contents(f"{model}-initial")
            self.published[model, 1] = contents(f"{model}-initial")
            self.models[model] = []
            for _ in range(chance.randint(4, 7)):
                self.add_stage(model, chance.choice((1, 1, 2)))
        self.start_coordinator()
        while world.now < 5.0 and not all(self._routable(slot) for slot in self.stages):
            world.run(world.now + 0.05)
        self._ask()
        self.faults.plan()
        self.timer.later(LOOK_S, self._look)
        world.run(world.now + WORK_S)
        self.faults.stop()
        deadline = world.now + SETTLE_S
        world.run(world.now + 10.0)
        while (unsettled := self._unsettled()) and world.now < deadline:
            world.run(world.now + LOOK_S)
        for invariant, what in unsettled:
            self.observer.broken(invariant, what)
        self.counts.tokens = self.observer.tokens
        self.counts.messages = self.network.messages
        self.counts.turns = world.turns
        self.counts.virtual_seconds = world.now
        for defect in world.defects:
            self.observer.broken("I0", defect)
        world.close()

    def _look(self) -> None:
        self.observer.looked()
        self.timer.later(LOOK_S, self._look)

    def _routable(self, slot: str) -> bool:
        coordinator = self.coordinator.coordinator
        found = coordinator.roster.slots.get(slot) if coordinator is not None else None
        return found is not None and not found.not_routable()

    def _ask(self) -> None:
        """Plan what is asked of the fleet, and by whom."""
        chance = self.world.chance("asked")
        for model in self.models:
            self.timer.later(chance.uniform(0, 3), self.train, model, 1)
        operator = Operator(self, self.world.spawn("operator"))
        several = {
            operator.act: (5, 11),
            operator.nap: (0, 1),
            operator.from_disk: (0, 2),
            operator.load_adapter: (0, 2),
            operator.unload_adapter: (0, 1),
            operator.heal: (0, 1),
            operator.hurry: (0, 2),
            operator.rename: (0, 1),
            operator.disable: (0, 1),
            operator.look: (0, 2),
        }
        for work, (least, most) in several.items():
            for number in range(chance.randint(least, most)):
                self._at(f"{work.__name__} {number}", operator.node, work)
        curious = Curious(self, self.world.spawn("curious"))
        for number in range(chance.randint(2, 6)):
            self._at(f"curious {number}", curious.node, curious.act)
        if self.seed % NAMELESS_EVERY == NAMELESS_AT:
            nameless = Nameless(self, self.world.spawn("nameless"))
            for number in range(4):
                self._at(f"nameless {number}", nameless.node, nameless.act)
        client = Client(self)
        for number in range(30):
            slot = chance.choice(sorted(self.stages))
            self._at(f"generate {number}", self.timer, functools.partial(client.generate, slot))

    def _at(self, key: str, node: Node, work: Callable[[random.Random], Coroutine[Any, Any, None]]) -> None:
        def plan(chance: random.Random) -> None:
            self.counts.operations += 1
            self.timer.later(chance.uniform(0, WORK_S), lambda: node.start(_run(work(chance))))

        self.step(key, plan)

    def train(self, model: str, incarnation: int) -> None:
        """Start a trainer, in the place of the one that there was."""
        trainer = Trainer(self, model, incarnation)
        self.faults.trainers[model] = trainer
        trainer.node.start(self._loop(trainer))

    async def _loop(self, trainer: Trainer) -> None:
        """A trainer's life: one update after the other."""
        number = 0
        while not self.faults.stopped:
            number += 1
            tag = f"{trainer.model}-{trainer.incarnation}-{number}"
            key = f"{tag} {trainer.node.name}"
            chance = self.world.chance(key)
            self.steps.append(key)
            if key not in self.dropped:
                self.counts.operations += 1
                try:
                    await trainer.update(tag, chance)
                except RlctlError as error:
                    if error.reason is Reason.TRAINER_FENCED:
                        self._outdated(trainer)
                        return
            await asyncio.sleep(chance.uniform(0.5, 8))

    def _outdated(self, trainer: Trainer) -> None:
        """A trainer was told that it is over: whoever started it, if it is still the one, starts a newer one."""
        if self.faults.trainers[trainer.model] is trainer:
            self.train(trainer.model, trainer.incarnation + 2)

    # I7, I8.

    def _unsettled(self) -> list[tuple[str, str]]:
        """What has not come to its end yet: operations, stages."""
        coordinator = self.coordinator.coordinator
        if coordinator is None:
            return [("I7", "the coordinator did not start")]
        found = [
            ("I8", f"{run.operation.verb} {run.operation.operation_id} has no outcome")
            for run in coordinator.operations._runs.values()
            if not run.ended.is_set()
        ]
        found += [("I8", f"{key} has no outcome on record") for key in self.observer.unended()]
        self.counts.quarantined = self.counts.unhealable = 0
        for name in self.stages:
            slot = coordinator.roster.slots.get(name)
            why = self._unsettled_stage(slot) if slot is not None else "it is not registered"
            if why:
                found.append(("I7", f"{name} is not settled: {why}"))
        return found

    def _unsettled_stage(self, slot: Slot) -> str:
        """Why a stage has not come to rest, or ""."""
        self.counts.unhealable += bool(slot.unhealable)
        if slot.unhealable or not slot.not_routable():
            return ""
        report = slot.report
        if report is not None and report.HasField("quarantine"):
            self.counts.quarantined += 1
            return ""  # its engine has lost a rank: only a restart helps
        if slot.state == STAGE_STATE_PAUSED and report is not None and not report.paused_by_update:
            return ""
        if slot.state == STAGE_STATE_ASLEEP or (slot.state == STAGE_STATE_READY and not slot.record.enabled):
            return ""
        return f"{StageState.Name(slot.state).removeprefix('STAGE_STATE_')}, {slot.not_routable()}"


async def _run(work: Awaitable[None]) -> None:
    with contextlib.suppress(RlctlError):
        await work
