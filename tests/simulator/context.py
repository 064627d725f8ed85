"""The common context of a seed: time, network, data plane, disks, observer, and drawn steps."""

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
    """Totals of a seed."""

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
        """Add the totals of a further seed."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


class Simulation:
    """The environment of the processes of a seed.

    Attributes:
        off: safeguards that are switched off.
        dropped: keys of omitted steps, to find the steps that a failure needs.
        steps: keys of all drawn steps.
        disks: checkpoints and adapters, by path.
        slots: every slot so far, by name.
        retained: number of ended operations that a coordinator keeps.
        fixed_addresses: a restarted stage listens at the address of its predecessor.
        settling: the time of requests and faults is over.
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
        """Record the key of an optional step; return True if this run has the step."""
        self.steps.append(key)
        return key not in self.dropped

    def step(self, key: str, do: Callable[[random.Random], object], *, fault: bool = False) -> None:
        """Do an optional step. Its random draws depend only on the seed and the key."""
        if self.drawn(key):
            self.counts.faults += fault
            do(self.world.chance(key))
