"""The serving processes: the stages in each slot, and the coordinator."""

from __future__ import annotations

from dataclasses import replace

from tests.simulator.context import Simulation
from tests.simulator.model.profiles import LEVELS, SimSlot
from tests.simulator.ports.shared_memory import TRAINERS_HOST
from tests.simulator.processes.coordinator import CoordinatorHost
from tests.simulator.processes.stage import StageHost


class Fleet:
    """The supervisor: starts, adds and removes processes.

    Attributes:
        models: slots of each model.
        stages: the last stage started for each slot.
        formers: earlier stages that are still alive.
        coordinator: the last coordinator started.
    """

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.models: dict[str, list[str]] = {}
        self.stages: dict[str, StageHost] = {}
        self.formers: list[StageHost] = []
        self.coordinator: CoordinatorHost
        self._boots = 0
        self._coordinators = 0

    def start_coordinator(self) -> None:
        self._coordinators += 1
        self.coordinator = CoordinatorHost(self.sim, f"coordinator-{self._coordinators}/0", self._coordinator_again)

    def _coordinator_again(self, host: CoordinatorHost) -> None:
        if self.coordinator is host:
            self.start_coordinator()

    def start_stage(self, slot: str) -> None:
        """Fill a slot anew: on its own host, unless the former stage still listens there."""
        taken = any(host.alive and host.slot == slot and host.at_home for host in self.formers)
        self._fill(slot, elsewhere=taken)

    def start_second(self, slot: str) -> None:
        """Fill a slot on another host, although its stage is alive."""
        self.formers.append(self.stages[slot])
        self._fill(slot, elsewhere=True)

    def _fill(self, slot: str, *, elsewhere: bool) -> None:
        self._boots += 1
        place = f"{slot}+{self._boots}" if elsewhere else ""
        self.stages[slot] = StageHost(self.sim, self.sim.slots[slot], self._boots, self._stage_again, place)

    def start_as_another(self, slot: str, model: str) -> None:
        """Let a slot serve a different model from now on, on another host; its former stage may live on."""
        former = self.stages[slot]
        self.models[former.model].remove(slot)
        self.models[model].append(slot)
        self.sim.slots[slot] = replace(self.sim.slots[slot], model=model)
        self.start_second(slot)

    def filling(self, slot: str) -> list[StageHost]:
        """Return the stages that were started for a slot and may be alive."""
        return [host for host in (self.stages.get(slot), *self.formers) if host is not None and host.slot == slot]

    def _stage_again(self, host: StageHost) -> None:
        if self.stages.get(host.slot) is host:
            self.start_stage(host.slot)

    def add_stage(self, model: str, ranks: int) -> None:
        """Fill a new slot."""
        slot = f"{model}-{sum(other.startswith(model) for other in self.sim.slots)}"
        modest = 5 if self.sim.world.chance(f"engines of {model}").random() < 0.15 else 0
        kind = self.sim.world.chance(f"kind of {slot}").choices([*LEVELS], (6, 2, 1, 1, modest))[0]
        beside_trainers = self.sim.world.chance(f"hosts of {model}").choice((0.0, 0.0, 0.5, 1.0))
        here = self.sim.world.chance(f"host of {slot}").random() < beside_trainers
        self.sim.slots[slot] = SimSlot(slot, model, ranks, kind, TRAINERS_HOST if here else f"host of {slot}")
        self.models.setdefault(model, []).append(slot)
        self.sim.counts.stages += 1
        self.start_stage(slot)

    def remove_stage(self, slot: str) -> None:
        """Empty a slot for good, if the coordinator can be reached."""
        *formers, host = reversed(self.filling(slot))
        for former in formers:
            former.kill()
        del self.stages[slot]
        self.models[host.model].remove(slot)
        host.node.start(host.leave())
