"""What all parts of one seed share: time, network, data plane, disks, who watches, and what was drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields

from rlctl.coordinator.operations.operations import RETAINED
from tests.simulator.engine_faults import EngineFaults
from tests.simulator.model.profiles import SimSlot
from tests.simulator.oracle import Observer
from tests.simulator.ports.journal import Store
from tests.simulator.ports.network import Network
from tests.simulator.ports.process_groups import Fabric, Tensors
from tests.simulator.ports.shared_memory import SharedMemory
from tests.simulator.ports.virtual_time import World


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


class Simulation:
    """What the processes of one seed run in.

    Attributes:
        off: safeguards that are turned off.
        dropped: keys of steps that are left out, to find those that a failure needs.
        steps: keys of what was drawn.
        disks: checkpoints and adapters, by path.
        slots: every slot that there has been, by name.
        retained: ended operations that a coordinator remembers.
        fixed_addresses: a stage that is started anew listens where the one before did.
        settling: the time in which things are asked and go wrong is over.
    """

    def __init__(self, seed: int, off: frozenset[str], dropped: frozenset[str], *, telling: bool) -> None:
        self.off = off
        self.dropped = dropped
        self.world = World(seed)
        self.network = Network(self.world)
        self.fabric = Fabric(self.world)
        self.memory = SharedMemory()
        self.store = Store()
        self.disks: dict[str, Tensors] = {}
        self.slots: dict[str, SimSlot] = {}
        self.observer = Observer(self.world, self.store, self.disks, self.slots, telling=telling)
        self.engine_faults = EngineFaults(self.observer)
        self.counts = Counts()
        self.steps: list[str] = []
        self.retained = self.world.chance("retained").choice((RETAINED, RETAINED, 25))
        if self.world.chance("retained least").random() < 0.1:
            self.retained = 3
        self.fixed_addresses = self.world.chance("fixed addresses").random() < 0.15
        self.settling = False

    def drawn(self, key: str) -> bool:
        """Something that can be left out is about to be done; whether this run has it."""
        self.steps.append(key)
        return key not in self.dropped

    def step(self, key: str, do: Callable[[random.Random], object], *, fault: bool = False) -> None:
        """Do something that can be left out. What it draws depends on nothing but the seed and its key."""
        if self.drawn(key):
            self.counts.faults += fault
            do(self.world.chance(key))
