"""What a plan changes in a fleet that runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlctl.launch.interface.spec import EngineSpec

ADD, REMOVE, RESTART, UNCHANGED = "add", "remove", "restart", "unchanged"


@dataclass(frozen=True)
class Change:
    """What becomes of one slot.

    Attributes:
        slot: its name.
        action: "add", "remove", "restart" or "unchanged".
        fields: why it is restarted: what differs.
    """

    slot: str
    action: str
    fields: tuple[str, ...] = field(default=())


def difference(wanted: Iterable[EngineSpec], running: Mapping[str, EngineSpec]) -> list[Change]:
    """One change for each slot: those that are wanted in their order, then those that go."""
    changes = []
    slots = set()
    for spec in wanted:
        slots.add(spec.slot)
        present = running.get(spec.slot)
        if present is None:
            changes.append(Change(spec.slot, ADD))
        elif differing := spec.differs(present):
            changes.append(Change(spec.slot, RESTART, tuple(differing)))
        else:
            changes.append(Change(spec.slot, UNCHANGED))
    return changes + [Change(slot, REMOVE) for slot in sorted(running.keys() - slots)]
