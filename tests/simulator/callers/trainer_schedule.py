"""Who starts trainers: one for each model, one update after the other, and a newer one for one that is over."""

from __future__ import annotations

import asyncio

from rlctl.contract.errors import Reason, RlctlError
from tests.simulator.callers.trainer import Trainer
from tests.simulator.processes.fleet import Fleet


class Trainers:
    """Until the fleet is to come to rest.

    Attributes:
        running: the trainer of each model that was started last.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._sim = fleet.sim
        self.running: dict[str, Trainer] = {}

    def start(self, model: str, incarnation: int) -> None:
        """Start a trainer, in the place of the one that there was."""
        trainer = self.running[model] = Trainer(self._fleet, model, incarnation)
        trainer.node.start(self._loop(trainer))

    async def _loop(self, trainer: Trainer) -> None:
        """A trainer's life: one update after the other."""
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
                except RlctlError as error:
                    if error.reason is Reason.TRAINER_FENCED:
                        self._outdated(trainer)
                        return
            await asyncio.sleep(chance.uniform(0.5, 8))

    def _outdated(self, trainer: Trainer) -> None:
        """A trainer was told that it is over: whoever started it, if it is still the one, starts a newer one."""
        if self.running[trainer.model] is trainer:
            self.start(trainer.model, trainer.incarnation + 2)
