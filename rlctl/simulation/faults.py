"""What goes wrong: drawn from the seed, counted, and stopped at a known time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from rlctl.errors import Reason
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED

if TYPE_CHECKING:
    from rlctl.simulation.clients import Trainer
    from rlctl.simulation.engine import SimEngine
    from rlctl.simulation.fleet import Simulation


class Faults:
    """The faults of one seed."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._random = sim.world.random
        self.trainers: dict[str, Trainer] = {}
        self.stopped = False
        self.disk_error = 0.0
        self._refuse = 0.0
        self._hang = 0.0
        self._skip = 0.0

    def plan(self, began: float) -> None:
        """Draw them."""
        from rlctl.simulation.fleet import WORK_S

        random = self._random
        if random.random() < 0.4:
            self._refuse = random.choice((0.01, 0.05))
        if random.random() < 0.3:
            self._hang = random.choice((0.002, 0.01))
        if random.random() < 0.2:
            self._skip = 0.03
        if random.random() < 0.3:
            self.disk_error = 0.03
        kinds = [
            self._kill_stage,
            self._kill_follower,
            self._stop_stage,
            self._reset,
            self._part,
            self._kill_coordinator,
            self._stop_coordinator,
            self._kill_trainer,
            self._stop_trainer,
            self._fill_disk,
            self._slow,
            self._stick,
        ]
        for _ in range(random.randint(6, 14)):
            fault = random.choice(kinds)
            at = random.uniform(0, WORK_S * 0.9)
            self._sim.counts.faults += 1
            self._sim.timer.later(at + began - self._sim.world.now, fault)

    def stop(self) -> None:
        """From here on nothing goes wrong any more, and what is gone comes back."""
        self.stopped = True
        self._refuse = self._hang = self._skip = self.disk_error = 0.0
        sim = self._sim
        sim.network.slow = 0.0
        sim.store.full = False
        for node in sim.world.nodes:
            node.go_on()
        if not sim.coordinator.node.alive or sim.coordinator.coordinator is None:
            sim.start_coordinator()
        for slot, host in list(sim.stages.items()):
            if not all(node.alive for node in host.nodes):
                host.kill()
                sim.start_stage(slot)
        sim.observer.note("the faults stop")

    # At the engine.

    def engine(self, engine: SimEngine, verb: str) -> Awaitable[None] | None:
        """What befalls a verb at one rank, or None."""
        if self.stopped:
            return None
        draw = self._random.random()
        if draw < self._refuse:
            return self._refusing(verb)
        if draw < self._refuse + self._hang:
            self._sim.observer.note(f"{verb} hangs at {engine.node.name}")
            return asyncio.sleep(self._random.uniform(5, 40))
        return None

    async def _refusing(self, verb: str) -> None:
        outcome = self._random.choice((OUTCOME_REJECTED, OUTCOME_REJECTED, OUTCOME_DIRTY))
        raise Reason.ENGINE_FAILED.error(f"{verb} failed", outcome=outcome)

    def skips_tensor(self) -> bool:
        """Whether a rank silently forgets a tensor."""
        return self._random.random() < self._skip

    # At processes and the network.

    def _stage(self) -> str:
        return self._random.choice(sorted(self._sim.stages))

    def _note(self, what: str) -> None:
        self._sim.observer.note(f"FAULT {what}")

    def _kill_stage(self) -> None:
        slot = self._stage()
        self._note(f"{slot} is killed")
        self._sim.stages[slot].kill()
        self._sim.timer.later(self._random.uniform(0.5, 20), self._restart_stage, slot)

    def _restart_stage(self, slot: str) -> None:
        if not self._sim.stages[slot].alive:
            self._sim.start_stage(slot)

    def _kill_follower(self) -> None:
        host = self._sim.stages[self._stage()]
        if host.tp_size > 1:
            self._note(f"rank 1 of {host.slot} is killed")
            host.nodes[1].kill()
            self._sim.timer.later(self._random.uniform(5, 20), self._replace, host.slot)

    def _replace(self, slot: str) -> None:
        host = self._sim.stages[slot]
        if not all(node.alive for node in host.nodes):
            host.kill()
            self._sim.start_stage(slot)

    def _stop_stage(self) -> None:
        host = self._sim.stages[self._stage()]
        node = self._random.choice(host.nodes)
        seconds = self._random.uniform(1, 30)
        self._note(f"{node.name} is stopped for {seconds:.1f} s")
        node.stop()
        self._sim.timer.later(seconds, node.go_on)

    def _reset(self) -> None:
        host = self._sim.stages[self._stage()]
        self._note(f"connections of {host.node.name} are reset")
        self._sim.network.reset(host.node)

    def _part(self) -> None:
        slots = self._random.sample(sorted(self._sim.stages), self._random.randint(1, 3))
        seconds = self._random.uniform(0.5, 25)
        self._note(f"{slots} are cut off for {seconds:.1f} s")
        self._sim.network.part(frozenset(slots), seconds, self._sim.timer)

    def _kill_coordinator(self) -> None:
        self._note("the coordinator is killed")
        self._sim.coordinator.node.kill()
        self._sim.timer.later(self._random.uniform(0.2, 12), self._restart_coordinator)

    def _restart_coordinator(self) -> None:
        if not self._sim.coordinator.node.alive:
            self._sim.start_coordinator()

    def _stop_coordinator(self) -> None:
        node = self._sim.coordinator.node
        seconds = self._random.uniform(1, 20)
        takeover = self._random.random() < 0.6
        self._note(f"the coordinator is stopped for {seconds:.1f} s{', and replaced' if takeover else ''}")
        node.stop()
        self._sim.timer.later(seconds, node.go_on)
        if takeover:
            self._sim.timer.later(seconds * self._random.random(), self._take_over)

    def _take_over(self) -> None:
        if not self.stopped:
            self._sim.start_coordinator()

    def _kill_trainer(self) -> None:
        if not self.trainers:
            return
        model = self._random.choice(sorted(self.trainers))
        self._note(f"the trainer of {model} is killed")
        self.trainers[model].node.kill()
        self._sim.timer.later(self._random.uniform(0.2, 10), self._restart_trainer, model)

    def _restart_trainer(self, model: str) -> None:
        if not self.stopped and not self.trainers[model].node.alive:
            self._sim.restart_trainer(model)

    def _stop_trainer(self) -> None:
        if not self.trainers:
            return
        node = self.trainers[self._random.choice(sorted(self.trainers))].node
        seconds = self._random.uniform(1, 40)
        self._note(f"{node.name} is stopped for {seconds:.1f} s")
        node.stop()
        self._sim.timer.later(seconds, node.go_on)

    def _fill_disk(self) -> None:
        seconds = self._random.uniform(0.1, 8)
        self._note(f"the journal's disk is full for {seconds:.1f} s")
        self._sim.store.full = True
        self._sim.timer.later(seconds, setattr, self._sim.store, "full", False)

    def _slow(self) -> None:
        self._note("the network is slow")
        self._sim.network.slow = self._random.choice((0.05, 0.5))
        self._sim.timer.later(self._random.uniform(1, 15), setattr, self._sim.network, "slow", 0.0)

    def _stick(self) -> None:
        for group in self._sim.fabric.groups.values():
            if not group.broken and self._random.random() < 0.5:
                self._note(f"collectives of {group.name} never return")
                group.stuck = True
