"""The state of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from rlctl.coordinator.fleet.slot import Slot
from rlctl.ports import Put
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.journal_pb2 import ModelRecord


@dataclass(eq=False)
class ModelState:
    """State of a model.

    Attributes:
        record: the journaled record.
        only: stages that may serve during a publish; None: every stage.
        update_id: open update, or "".
        update_owner: owner of the open update.
        lease_until: end of the update lease on the clock's ``now``; None: no update is open.
        fingerprints: the sources' fingerprints of the published version, empty if this coordinator did not receive any.
        batch: returns the targets of the present batch of a rolling update, which serve nothing for a while.
        opening: locked while an update of the model is planned and accepted, or a stage of the model deregisters.
    """

    record: ModelRecord
    admitted: list[WeightVersion] = field(default_factory=list)
    only: frozenset[Slot] | None = None
    update_id: str = ""
    update_owner: str = ""
    lease_until: float | None = None
    fingerprints: bytes = b""
    batch: Callable[[], Collection[Slot]] = tuple
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


def model_put(record: ModelRecord) -> Put:
    return Put("model", record.name, record.SerializeToString())
