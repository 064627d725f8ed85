"""The changes that a deployment plan makes in a running fleet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlctl.launch.interface.spec import EngineSpec

ADD, REMOVE, RESTART, UNCHANGED = "add", "remove", "restart", "unchanged"


@dataclass(frozen=True)
class Change:
    """The change of a slot.

    Attributes:
        action: "add", "remove", "restart" or "unchanged".
        fields: reason of a restart: the fields that differ.
    """

    slot: str
    action: str
    fields: tuple[str, ...] = field(default=())


def difference(wanted: Iterable[EngineSpec], running: Mapping[str, EngineSpec]) -> list[Change]:
    """Return a change for each slot: the slots of ``wanted`` in order, then the slots to remove."""
    changes = []
    slots = set()
    for spec in wanted:
        slots.add(spec.slot)
        existing = running.get(spec.slot)
        if existing is None:
            changes.append(Change(spec.slot, ADD))
        elif differing := spec.differs(existing):
            changes.append(Change(spec.slot, RESTART, tuple(differing)))
        else:
            changes.append(Change(spec.slot, UNCHANGED))
    return changes + [Change(slot, REMOVE) for slot in sorted(running.keys() - slots)]
