"""Schedule of trainers: one per model, updates in sequence, and a newer trainer for one that ends."""

from __future__ import annotations

import asyncio

from rlctl.contract.errors import Reason, RlctlError
from tests.simulator.callers.trainer import Trainer
from tests.simulator.callers.trainer_ranks import SourceError
from tests.simulator.processes.fleet import Fleet


class Trainers:
    """Runs until the fleet settles.

    Attributes:
        running: the trainer of each model that was started last.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._sim = fleet.sim
        self.running: dict[str, Trainer] = {}

    def start(self, model: str, incarnation: int) -> None:
        """Start a trainer, in place of the previous trainer."""
        trainer = self.running[model] = Trainer(self._fleet, model, incarnation)
        trainer.node.start(self._loop(trainer))

    async def _loop(self, trainer: Trainer) -> None:
        """Run a trainer's updates in sequence."""
        number = 0
        while not self._sim.settling:
            number += 1
            tag = f"{trainer.model}-{trainer.incarnation}-{number}"
            key = f"{tag} {trainer.node.name}"
            chance = self._sim.world.chance(key)
            if self._sim.drawn(key):
                self._sim.counts.operations += 1
                try:
                    await trainer.update(tag, chance)
                except (RlctlError, SourceError) as error:
                    reason = error.reason if isinstance(error, RlctlError) else None
                    if reason in (Reason.TRAINER_FENCED, Reason.TRAINER_RANK_LOST):
                        self._replace(trainer)
                        return
            await asyncio.sleep(chance.uniform(0.5, 8))

    def _replace(self, trainer: Trainer) -> None:
        """Start a newer trainer for one that is fenced or has lost a rank, unless it has been replaced already."""
        if self.running[trainer.model] is trainer:
            self.start(trainer.model, trainer.incarnation + 2)
