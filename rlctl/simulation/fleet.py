"""One seed: a fleet of processes, what is asked of it, what befalls it, and what must be true in the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass, field

from rlctl.errors import RlctlError
from rlctl.simulation.clients import Client, Operator, Trainer
from rlctl.simulation.engine import contents
from rlctl.simulation.fabric import Fabric, Tensors
from rlctl.simulation.faults import Faults
from rlctl.simulation.hosts import CoordinatorHost, StageHost
from rlctl.simulation.journal import Store
from rlctl.simulation.network import Network
from rlctl.simulation.observer import Observer
from rlctl.simulation.world import Node, World
from rlctl.v1.common_pb2 import (
    STAGE_STATE_ASLEEP,
    STAGE_STATE_PAUSED,
    STAGE_STATE_READY,
    STAGE_STATE_RETIRED,
    StageState,
)

WORK_S = 60.0
"""Time in which things are asked and faults happen."""

SETTLE_S = 400.0
"""Time for the fleet to recover once the faults have stopped: longer than a heal may take."""

LOOK_S = 5.0

LEASE_S = 10.0


@dataclass
class Counts:
    """What a seed consisted of."""

    stages: int = 0
    operations: int = 0
    faults: int = 0
    tokens: int = 0
    messages: int = 0
    turns: int = 0


@dataclass
class Simulation:
    """The world of one seed."""

    seed: int
    off: frozenset[str] = frozenset()
    published: dict[tuple[str, int], Tensors] = field(default_factory=dict)
    disks: dict[str, Tensors] = field(default_factory=dict)
    models: dict[str, list[str]] = field(default_factory=dict)
    stages: dict[str, StageHost] = field(default_factory=dict)
    lease_s: float = LEASE_S

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.network = Network(self.world)
        self.fabric = Fabric(self.world)
        self.store = Store()
        self.observer = Observer(self)
        self.store.watch = self.observer.journaled
        self.faults = Faults(self)
        self.counts = Counts()
        self.timer: Node = self.world.spawn("time")
        self._boots = 0
        self._coordinators = 0
        self._tp: dict[str, int] = {}
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
        self.coordinator = CoordinatorHost(self, f"coordinator/{self._coordinators}")

    def start_stage(self, slot: str) -> None:
        """Fill a slot anew."""
        model = next(model for model, slots in self.models.items() if slot in slots)
        self._boots += 1
        self.stages[slot] = StageHost(self, slot, model, self._tp[slot], f"{model}-initial", self._boots)

    # A seed.

    def run(self) -> None:
        """All of it."""
        random, world = self.world.random, self.world
        for model in ("actor", "critic")[: random.randint(1, 2)]:
            self.disks[f"{model}-initial"] = contents(f"{model}-initial")
            self.published[model, 1] = contents(f"{model}-initial")
            self.models[model] = [f"{model}-{index}" for index in range(random.randint(4, 7))]
            for slot in self.models[model]:
                self._tp[slot] = random.choice((1, 1, 2))
                self.start_stage(slot)
                self.counts.stages += 1
        self.start_coordinator()
        world.run(world.now + 5.0, lambda: all(self._routable(slot) for slot in self.stages))
        began = world.now
        self._ask(began)
        self.faults.plan(began)
        world.run(began + WORK_S)
        self.faults.stop()
        deadline = world.now + SETTLE_S
        world.run(world.now + 2 * LOOK_S)
        while (unsettled := self._unsettled()) and world.now < deadline:
            world.run(world.now + LOOK_S)
        for invariant, what in unsettled:
            self.observer.broken(invariant, what)
        self.counts.tokens = self.observer.tokens
        self.counts.messages = self.network.messages
        self.counts.turns = world.turns
        for defect in world.defects:
            self.observer.broken("I0", defect)
        world.close()

    def _routable(self, slot: str) -> bool:
        coordinator = self.coordinator.coordinator
        found = coordinator.roster.slots.get(slot) if coordinator is not None else None
        return found is not None and not found.not_routable()

    def _ask(self, began: float) -> None:
        """Plan what is asked of the fleet, and by whom."""
        random = self.world.random
        for model in self.models:
            self.timer.later(random.uniform(0, 3), self._train, model, 1)
        operator = Operator(self, self.world.spawn("operator"))
        for _ in range(random.randint(6, 14)):
            self._at(began, operator.node, operator.act)
        for number in range(random.randint(0, 2)):
            model = random.choice(sorted(self.models))
            self._at(began, operator.node, lambda m=model, n=number: operator.from_disk(m, f"{m}-disk-{n}"))
        for _ in range(random.randint(0, 2)):
            self._at(began, operator.node, operator.heal)
        client = Client(self)
        for _ in range(40):
            slot = random.choice(sorted(self.stages))
            self._at(began, self.timer, lambda s=slot: client.generate(s))
        self.operator = operator

    def _at(self, began: float, node: Node, work: object) -> None:
        assert callable(work)
        self.counts.operations += 1

        def start() -> None:
            awaitable = work()
            assert isinstance(awaitable, Awaitable)
            node.start(_run(awaitable))

        self.timer.later(self.world.random.uniform(0, WORK_S) + began - self.world.now, start)

    def _train(self, model: str, incarnation: int) -> None:
        trainer = Trainer(self, model, incarnation)
        self.faults.trainers[model] = trainer
        trainer.node.start(self._loop(trainer))

    async def _loop(self, trainer: Trainer) -> None:
        """A trainer's life: one update after the other."""
        number = 0
        while not self.faults.stopped:
            number += 1
            self.counts.operations += 1
            await _run(trainer.update(f"{trainer.model}-{trainer.incarnation}-{number}"))
            await asyncio.sleep(self.world.random.uniform(0.5, 8))

    def restart_trainer(self, model: str) -> None:
        """The trainer comes back, as another process."""
        old = self.faults.trainers[model]
        self._train(model, old.incarnation + self.world.random.randint(0, 1))

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
        for slot in coordinator.roster.slots.values():
            state = slot.state
            name = StageState.Name(state).removeprefix("STAGE_STATE_")
            if state == STAGE_STATE_RETIRED or slot.quarantine is not None or slot.unhealable:
                continue
            if state == STAGE_STATE_READY and not slot.not_routable():
                continue
            if state == STAGE_STATE_READY and not slot.record.enabled:
                continue
            by_name = slot.report is not None and not slot.report.paused_by_update
            if state == STAGE_STATE_PAUSED and by_name:
                continue
            if state == STAGE_STATE_ASLEEP:
                continue
            found.append(("I7", f"{slot.name} ended {name}: {slot.not_routable()}"))
        return found


async def _run(work: Awaitable[None]) -> None:
    with contextlib.suppress(RlctlError):
        await work
