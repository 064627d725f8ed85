"""Faults that wait for a step of the protocol: a crash between two steps is too rare to be left to the clock."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS = (
    "PrepareUpdate",
    "PauseGeneration",
    "UpdateWeights",
    "SealUpdate",
    "CommitUpdate",
    "FlushCache",
    "CheckWeights",
    "AbortUpdate",
    "ContinueGeneration",
    "/heal/",
)
"""What command ids say of the step that they belong to."""

RECORDS = ("update/", "update/", "model/", "operation/", "slot/")

ON_WIRE = ("kill stage", "stop stage", "reset", "part", "kill coordinator", "stop coordinator", "stop trainer")
ON_DISK = ("kill coordinator", "kill coordinator", "stop coordinator", "stop trainer")


@dataclass
class Trap:
    """Springs once, at the ``count``-th message or record of its kind.

    Attributes:
        where: "command" (a command was sent), "answer" (a stage has answered one), "journal" (a record is durable).
        slot: the stage that the command is for; "": any.
    """

    where: str
    what: str
    count: int
    action: str
    chance: random.Random
    slot: str = ""

    @classmethod
    def drawn(cls, chance: random.Random) -> Trap:
        """One of them."""
        where = chance.choice(("command", "answer", "journal"))
        disk = where == "journal"
        what, action = chance.choice(RECORDS if disk else STEPS), chance.choice(ON_DISK if disk else ON_WIRE)
        return cls(where, what, chance.randint(1, 40), action, chance)

    def springs(self, where: str, what: str) -> bool:
        """Whether this is the one."""
        if where == self.where and self.what in what and (not self.slot or f"/{self.slot}/" in what):
            self.count -= 1
        return self.count == 0
