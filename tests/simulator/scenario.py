"""A seed: a fleet of processes, requests, faults, and the final checks."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rlctl.contract.errors import RlctlError
from rlctl.ports import Delete, Put
from tests.simulator import inspection
from tests.simulator.callers.implicit_trainer import Nameless
from tests.simulator.callers.invalid_requests import Curious
from tests.simulator.callers.operators_and_clients import Client, Operator
from tests.simulator.callers.trainer_schedule import Trainers
from tests.simulator.context import Simulation
from tests.simulator.faults.faults import WORK_S, Faults
from tests.simulator.model.rank_weights import contents
from tests.simulator.ports.virtual_time import Node
from tests.simulator.processes.fleet import Fleet

SETTLE_S = 400.0
"""Time for the fleet to recover after the faults: longer than a heal may take."""

LOOK_S = 1.0

NAMELESS_EVERY, NAMELESS_AT = 7, 3
"""Seeds with implicit trainers: the remains of their updates keep other trainers from most updates."""


MANY_EVERY, MANY_AT = 7, 5
"""Seeds with clients that send many requests over one stream, and an operator who decides on heals."""


class Seed:
    """The course of a seed."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._world = sim.world
        self._fleet = Fleet(sim)
        self._trainers = Trainers(self._fleet)
        self._faults = Faults(self._fleet, self._trainers)
        sim.store.watch = self._journaled

    def _journaled(self, change: Put | Delete) -> None:
        self._sim.observer.journaled(change)
        self._faults.wrote(change)

    def run(self) -> None:
        sim, world, fleet = self._sim, self._world, self._fleet
        chance = world.chance("fleet")
        for model in ("actor", "critic")[: chance.randint(1, 2)]:
            sim.disks[f"{model}-initial"] = sim.observer.published[model, 1] = contents(f"{model}-initial")
            for _ in range(chance.randint(4, 7)):
                fleet.add_stage(model, chance.choice((1, 1, 2)))
        fleet.start_coordinator()
        while world.now < 5.0 and not all(self._routable(slot) for slot in fleet.stages):
            world.run(world.now + 0.05)
        self._ask()
        self._faults.plan()
        world.timer.later(LOOK_S, self._look)
        world.run(world.now + WORK_S)
        self._faults.stop()
        deadline = world.now + SETTLE_S
        world.run(world.now + 10.0)
        while (unsettled := inspection.unsettled(fleet)) and world.now < deadline:
            world.run(world.now + LOOK_S)
        for invariant, what in unsettled:
            sim.observer.broken(invariant, what)
        sim.counts.tokens = sim.observer.tokens
        sim.counts.messages = sim.network.messages
        sim.counts.turns = world.turns
        sim.counts.virtual_seconds = world.now
        world.find_unheard()
        for defect in world.defects:
            sim.observer.broken("I0", defect)
        world.close()

    def _look(self) -> None:
        inspection.look(self._fleet)
        self._world.timer.later(LOOK_S, self._look)

    def _routable(self, slot: str) -> bool:
        coordinator = self._fleet.coordinator.coordinator
        found = coordinator.roster.slots.get(slot) if coordinator is not None else None
        return found is not None and not found.not_routable()

    def _ask(self) -> None:
        """Plan the requests to the fleet, and their callers."""
        world, fleet = self._world, self._fleet
        chance = world.chance("asked")
        for model in fleet.models:
            world.timer.later(chance.uniform(0, 3), self._trainers.start, model, 1)
        operator = Operator(fleet, world.spawn("operator"))
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
        for number in range(world.chance("dismissals").choice((0, 0, 0, 0, 1, 2))):
            self._at(f"dismiss {number}", operator.node, operator.dismiss)
        for number in range(world.chance("pauses of adapters").choice((0, 0, 1, 1, 2))):
            self._at(f"pause adapter {number}", operator.node, operator.pause_adapter)
        curious = Curious(fleet, world.spawn("curious"))
        for number in range(chance.randint(2, 6)):
            self._at(f"curious {number}", curious.node, curious.act)
        if world.seed % NAMELESS_EVERY == NAMELESS_AT:
            nameless = Nameless(fleet, world.spawn("nameless"))
            for number in range(4):
                self._at(f"nameless {number}", nameless.node, nameless.act)
        client = Client(fleet)
        for number in range(30):
            slot = chance.choice(sorted(fleet.stages))
            self._at(f"generate {number}", world.timer, functools.partial(client.generate, slot))
        if world.seed % MANY_EVERY == MANY_AT:
            self._at("heal by hand", operator.node, operator.heal_by_hand)
            for number in range(6):
                slot = chance.choice(sorted(fleet.stages))
                self._at(f"generate many {number}", world.timer, functools.partial(client.generate_many, slot))

    def _at(self, key: str, node: Node, work: Callable[[random.Random], Coroutine[Any, Any, None]]) -> None:
        def plan(chance: random.Random) -> None:
            self._sim.counts.operations += 1
            self._world.timer.later(chance.uniform(0, WORK_S), lambda: node.start(_run(work(chance))))

        self._sim.step(key, plan)


async def _run(work: Awaitable[None]) -> None:
    with contextlib.suppress(RlctlError):
        await work
