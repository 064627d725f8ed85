"""Faults that wait for a step of the protocol: a crash between two steps is too rare to be left to the clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.ports import Delete, Put

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

KINDS = ("operation", "operation", "update", "update", "model", "slot", "fleet", "pause", "key", "forgotten", "")
"""Records that the disk may not take; "": whichever."""

ON_WIRE = ("kill stage", "stop stage", "reset", "part", "kill coordinator", "stop coordinator", "stop trainer")
TOGETHER = ("kill stage", "stop stage", "reset", "part", "kill coordinator", "refuse a write", "kill trainer")
"""What may come right behind another fault."""

ON_DISK = ("kill coordinator", "kill coordinator", "stop coordinator", "stop trainer")


@dataclass
class Trap:
    """Springs once, at the ``count``-th message or record of its kind.

    Attributes:
        where: "command" (a command was sent), "answer" (a stage has answered one), "journal" (a record is durable).
        slot: the stage that the command is for; "": any.
        follows: what befalls the same stage, or the coordinator, right after that; "": nothing.
    """

    where: str
    what: str
    count: int
    action: str
    chance: random.Random
    slot: str = ""
    follows: str = ""

    @classmethod
    def drawn(cls, chance: random.Random) -> Trap:
        """One of them."""
        where = chance.choice(("command", "answer", "journal"))
        disk = where == "journal"
        what, action = chance.choice(RECORDS if disk else STEPS), chance.choice(ON_DISK if disk else ON_WIRE)
        return cls(where, what, chance.randint(1, 40), action, chance)

    @classmethod
    def double(cls, chance: random.Random) -> Trap:
        """One that another fault follows."""
        first = cls.drawn(chance)
        first.follows = chance.choice(TOGETHER)
        return first

    @classmethod
    def cancelling(cls, chance: random.Random) -> Trap:
        """Somebody cancels an operation as soon as it has come to a step."""
        where = chance.choice(("command", "answer"))
        return cls(where, chance.choice((*STEPS, "ReleaseMemory", "/1")), chance.randint(1, 20), "cancel", chance)

    def springs(self, where: str, what: str) -> bool:
        """Whether this is the one."""
        if where == self.where and self.what in what and (not self.slot or f"/{self.slot}/" in what):
            self.count -= 1
        return self.count == 0


@dataclass
class Refusal:
    """The disk does not take the ``count``-th write with a record of a kind, nor the next ``times`` - 1 writes."""

    kind: str
    count: int
    times: int

    def meets(self, changes: Sequence[Put | Delete]) -> bool:
        """Whether this write is refused."""
        if self.count > 0 and (not self.kind or any(change.kind == self.kind for change in changes)):
            self.count -= 1
        if self.count or not self.times:
            return False
        self.times -= 1
        return True
