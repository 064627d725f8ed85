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
"""Parts of command ids that identify the step."""

RECORDS = ("update/", "update/", "model/", "operation/", "slot/")

KINDS = ("operation", "operation", "update", "update", "model", "slot", "fleet", "pause", "key", "forgotten", "")
"""Kinds of records that the disk may refuse; "": any kind."""

ON_WIRE = ("kill stage", "stop stage", "reset", "part", "kill coordinator", "stop coordinator", "stop trainer")
TOGETHER = ("kill stage", "stop stage", "reset", "part", "kill coordinator", "refuse a write", "kill trainer")
"""Faults that may follow another fault immediately."""

ON_DISK = ("kill coordinator", "kill coordinator", "stop coordinator", "stop trainer")


@dataclass
class Trap:
    """Springs once, at the ``count``-th message or record of its kind.

    Attributes:
        where: "command" (a command was sent), "answer" (a stage has answered a command), "journal" (a record is
            durable).
        slot: the stage of the command; "": any.
        follows: a further fault at the same stage, or the coordinator, right afterwards; "": no fault.
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
        where = chance.choice(("command", "answer", "journal"))
        disk = where == "journal"
        what, action = chance.choice(RECORDS if disk else STEPS), chance.choice(ON_DISK if disk else ON_WIRE)
        return cls(where, what, chance.randint(1, 40), action, chance)

    @classmethod
    def double(cls, chance: random.Random) -> Trap:
        """Draw a trap with a second fault."""
        first = cls.drawn(chance)
        first.follows = chance.choice(TOGETHER)
        return first

    @classmethod
    def cancelling(cls, chance: random.Random) -> Trap:
        """Draw a trap that cancels an operation at a step."""
        where = chance.choice(("command", "answer"))
        return cls(where, chance.choice((*STEPS, "ReleaseMemory", "/1")), chance.randint(1, 20), "cancel", chance)

    def springs(self, where: str, what: str) -> bool:
        if where == self.where and self.what in what and (not self.slot or f"/{self.slot}/" in what):
            self.count -= 1
        return self.count == 0


@dataclass
class Refusal:
    """A disk fault: the ``count``-th write with a record of a kind is refused, and the next ``times`` - 1 writes."""

    kind: str
    count: int
    times: int

    def meets(self, changes: Sequence[Put | Delete]) -> bool:
        """Return True if this write is refused."""
        if self.count > 0 and (not self.kind or any(change.kind == self.kind for change in changes)):
            self.count -= 1
        if self.count or not self.times:
            return False
        self.times -= 1
        return True
