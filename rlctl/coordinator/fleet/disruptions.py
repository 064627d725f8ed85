"""Voluntary disruptions: stages that an operator or a rolling update takes out of service.

A disruption is refused if fewer stages of a model than its ``min_healthy`` would remain routable. Losses are not
refused, and neither are pauses of whole models: their stages keep engine and weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from rlctl.contract import min_healthy
from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.v1 import common_pb2

_RETURNING = (
    common_pb2.STAGE_STATE_READY,
    common_pb2.STAGE_STATE_PAUSED,
    common_pb2.STAGE_STATE_UPDATING,
    common_pb2.STAGE_STATE_ASLEEP,
)
"""States of stages that serve, or serve again without a heal."""


def healthy(roster: Roster, model: ModelState) -> list[Slot]:
    """Return the routable stages of a model, without the present batch of a rolling update."""
    batch = model.batch()
    return [slot for slot in roster.of_model(model) if slot not in batch and not slot.not_routable()]


@contextlib.contextmanager
def disrupting(roster: Roster, slots: Collection[Slot], *, force: bool) -> Iterator[None]:
    """Let stages leave service in the block; a disruption at the same time does not count them. Raises MIN_HEALTHY."""
    if not force:
        refuse(roster, slots)
    for slot in slots:
        slot.leaving += 1
    try:
        yield
    finally:
        for slot in slots:
            slot.leaving -= 1
        roster.changed()


def refuse(roster: Roster, slots: Collection[Slot]) -> None:
    """Raise MIN_HEALTHY if too few stages remain routable without ``slots``. Lost stages are no disruption."""
    for name in sorted({slot.model for slot in slots}):
        model = roster.models[name]
        least = roster.min_healthy(model)
        leaving = [slot for slot in slots if slot.model == name and _returns(slot)]
        routable = healthy(roster, model)
        remaining = [slot for slot in routable if slot not in leaving]
        if not least or not leaving or len(remaining) >= least:
            continue
        names, text = ", ".join(slot.name for slot in leaving), min_healthy.words(model.record.min_healthy)
        raise Reason.MIN_HEALTHY.error(
            f"{name} has {len(routable)} of {len(roster.of_model(model))} stages routable, and would have "
            f"{len(remaining)} without {names}; min_healthy is {text}"
            + (f" ({least} stages)" if model.record.min_healthy.percent else ""),
            metadata={"model": name, "min_healthy": text, "limit": str(least), "healthy": str(len(routable))},
        )


def refuse_rolling(roster: Roster, targets: Collection[Slot]) -> None:
    """Raise MIN_HEALTHY if a rolling update cannot take a single serving target out of service."""
    serving = [slot for slot in targets if _returns(slot)]
    serving.sort(key=lambda slot: bool(slot.not_routable()))  # a routable target is the larger loss
    if serving:
        refuse(roster, serving[:1])


@contextlib.contextmanager
def batch(model: ModelState, targets: Collection[Slot]) -> Iterator[None]:
    """Count the targets of the present batch as out of service in the block."""
    model.batch = lambda: targets
    try:
        yield
    finally:
        model.batch = tuple


def batch_size(roster: Roster, model: ModelState, most: int) -> int:
    """Return the size of the next batch of a rolling update: at most ``most``, at least 1.

    A batch of one target also goes on below the limit, after a loss during the update. An end of the update would take
    all stages without the version out of service.
    """
    least = roster.min_healthy(model)
    routable = sum(not slot.not_routable() for slot in roster.of_model(model))  # with the batch before
    return max(1, min(most, routable - least)) if least else most


def _returns(slot: Slot) -> bool:
    return slot.state in _RETURNING and slot.record.enabled and slot.quarantine is None
