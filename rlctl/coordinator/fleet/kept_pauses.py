"""Pauses by name in force. A pause is journaled before the first command is sent, and ends with a continue by name.

A pause belongs to the fleet, not to the paused stages. A stage that was unreachable, restarts or joins
later is paused before it may serve. The scope of a pause is an adapter or, with "", all requests. Pauses of different
scopes are independent.

A continue can only narrow a pause. The rest of a pause of a model covers stages of that model only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from rlctl.contract.errors import RlctlError
from rlctl.coordinator.journal.records import parsed
from rlctl.ports import Delete, Journal, Put
from rlctl.v1.common_pb2 import Target
from rlctl.v1.journal_pb2 import PauseRecord

log = logging.getLogger(__name__)


class Addressed(Protocol):
    """The fields of a slot that a target can name."""

    name: str
    model: str
    stage: str


def covers(target: Target, slot: Addressed) -> bool:
    return (
        target.model in ("", slot.model)
        and (not target.slots or slot.name in target.slots)
        and (not target.stages or slot.stage in target.stages)
    )


class Pauses:
    """Pauses in force, oldest first. In each scope, the newest pause that covers a slot decides."""

    def __init__(self, journal: Journal, changed: Callable[[], None]) -> None:
        """``changed`` is called after every change of the pauses in force."""
        self._journal = journal
        self._changed = changed
        self._records: dict[str, PauseRecord] = {}
        self._replaced: dict[str, list[PauseRecord]] = {}
        """Replaced pauses, by the key of the running pause. A take-back puts them in force again."""
        self._unrecorded: set[str] = set()
        """Ended and restored pauses that are not journaled yet."""
        self._writing = asyncio.Lock()

    def load(self) -> None:
        records = [parsed("pause", key, body, PauseRecord) for key, body in self._journal.read("pause")]
        records.sort(key=lambda record: record.pause.since.ToNanoseconds())
        self._records = {record.pause.operation_id: record for record in records}

    def of(self, slot: Addressed) -> dict[str, PauseRecord]:
        """Return the pauses in force for a slot, by scope."""
        return {record.pause.adapter: record for record in self._records.values() if _applies(record, slot)}

    def beside(self, slot: Addressed, key: str) -> bool:
        """Whether a further pause of the same scope covers a slot."""
        scope = self._records[key].pause.adapter
        records = (record for name, record in self._records.items() if name != key)
        return any(record.pause.adapter == scope and _applies(record, slot) for record in records)

    def besides(self, keys: Collection[str], adapter: str) -> list[str]:
        """Return keys of a scope's pauses that are or may again be in force, except ``keys``."""
        replaced = (record for records in self._replaced.values() for record in records)
        scoped = (record.pause for record in (*self._records.values(), *replaced) if record.pause.adapter == adapter)
        return [pause.operation_id for pause in scoped if pause.operation_id not in keys]

    @property
    def in_force(self) -> list[PauseRecord]:
        return list(self._records.values())

    async def begin(self, record: PauseRecord) -> None:
        """Put a pause in force, durably. Covered earlier pauses end. Raises JOURNAL_FAILED.

        Call :meth:`confirm` or :meth:`take_back` afterwards.
        """
        key = record.pause.operation_id
        async with self._writing:
            scope = record.pause.adapter
            earlier = [other for name, other in self._records.items() if name != key]
            earlier = [other for other in earlier if other.pause.adapter == scope]
            replaced = [other for other in earlier if _within(other.target, record.target)]
            replaced_ids = [other.pause.operation_id for other in replaced]
            await self._journal.write([_put(record), *(Delete("pause", other) for other in replaced_ids)])
            for other in (*replaced_ids, key):
                self._records.pop(other, None)
            self._records[key] = record
            self._replaced[key] = replaced
            self._unrecorded.discard(key)
            self._changed()

    def confirm(self, key: str) -> None:
        """Record that the targets have confirmed a pause. The replaced pauses stay ended."""
        self._replaced.pop(key, None)

    async def take_back(self, key: str) -> None:
        """End a pause that a target did not confirm. The replaced pauses return, except for parts that a continue has
        ended.
        """
        await self._remove(key, restores=True)

    async def expire(self, key: str) -> None:
        """End a pause for the whole target. The replaced pauses stay ended."""
        await self._remove(key, restores=False)

    async def _remove(self, key: str, *, restores: bool) -> None:
        """End a pause, also if the journal fails. A restarted coordinator would then restore the pause until a continue
        by name.
        """
        async with self._writing:
            restored = self._replaced.pop(key, []) if restores else []
            for newer, replaced in self._replaced.items():
                remaining = [other for other in replaced if other.pause.operation_id != key]
                if len(remaining) < len(replaced):  # a newer running pause covers all of these
                    self._replaced[newer], restored = [*restored, *remaining], []
            self._records.pop(key, None)
            self._records = {**{other.pause.operation_id: other for other in restored}, **self._records}
            self._unrecorded |= {key, *(other.pause.operation_id for other in restored)}
            self._changed()
            try:
                await self._record()
            except RlctlError as error:
                log.warning("pause %s has ended, and the journal could not record the end: %s", key, error)

    async def end(
        self,
        target: Target,
        slots: Sequence[Addressed],
        refused: Collection[str],
        with_it: Sequence[Put] = (),
        *,
        adapter: str = "",
        newer: Collection[str] = (),
    ) -> None:
        """End the pauses of a continue's target and scope, durably, except for the slots in ``refused``.

        Args:
            slots: all slots.
            with_it: further puts of the same write.
            newer: pauses that began after the continue and stay.
        """
        async with self._writing:

            def narrowed(record: PauseRecord) -> PauseRecord | None:
                if record.pause.adapter != adapter or record.pause.operation_id in newer:
                    return record
                return _rest(record, target, slots, refused)

            narrowed_records = {key: narrowed(record) for key, record in self._records.items()}
            changed = {key: rest for key, rest in narrowed_records.items() if rest != self._records[key]}
            ends = [Delete("pause", key) if rest is None else _put(rest) for key, rest in changed.items()]
            if ends or with_it:
                await self._journal.write([*ends, *with_it])
            self._records = {key: rest for key, rest in narrowed_records.items() if rest is not None}
            for key, replaced in self._replaced.items():
                self._replaced[key] = [rest for rest in map(narrowed, replaced) if rest is not None]
            if changed:
                self._unrecorded.difference_update(changed)
                self._changed()

    async def refill(self, name: str, write: Callable[[Sequence[Put]], Awaitable[None]]) -> None:
        """Cancel the continues of a slot that a stage of a different model or pipeline stage fills.

        Pauses of all slots then cover the slot like a stage that joins later. ``write`` journals the changes.
        """
        async with self._writing:
            changed = {key: _refilled(each, name) for key, each in self._records.items() if name in each.continued}
            await write([_put(record) for record in changed.values()])
            self._records.update(changed)
            for key, replaced in self._replaced.items():
                self._replaced[key] = [_refilled(each, name) for each in replaced]
            self._unrecorded.difference_update(changed)

    async def record_ended(self) -> None:
        """Journal the changes whose first write failed. Raises JOURNAL_FAILED if the write fails again."""
        async with self._writing:
            await self._record()

    async def _record(self) -> None:
        late = sorted(self._unrecorded)
        if late:
            await self._journal.write(
                [_put(self._records[key]) if key in self._records else Delete("pause", key) for key in late]
            )
            self._unrecorded.difference_update(late)


def _applies(record: PauseRecord, slot: Addressed) -> bool:
    """Whether a pause covers a slot without a later continue."""
    return covers(record.target, slot) and slot.name not in record.continued


def _rest(
    record: PauseRecord, target: Target, slots: Sequence[Addressed], refused: Collection[str]
) -> PauseRecord | None:
    """Return the rest of a pause after a continue of a target, except for the slots in ``refused``. None: no rest."""
    remainder = PauseRecord()
    remainder.CopyFrom(record)
    paused = [slot for slot in slots if _applies(record, slot)]
    continued = {slot.name for slot in paused if covers(target, slot) and slot.name not in refused}
    if _within(record.target, target):
        names = [slot.name for slot in paused if slot.name not in continued]
    elif record.target.slots:
        # A slot may be filled by a stage of the pause's model again.
        names = [name for name in record.target.slots if name not in {*record.continued, *continued}]
    else:
        remainder.continued.extend(slot.name for slot in paused if slot.name in continued)
        return remainder
    remainder.target.slots[:] = names
    del remainder.continued[:]
    return remainder if names else None


def _refilled(record: PauseRecord, name: str) -> PauseRecord:
    """Return a pause without the continues of a slot."""
    refilled = PauseRecord()
    refilled.CopyFrom(record)
    refilled.continued[:] = [continued for continued in record.continued if continued != name]
    return refilled


def _within(inner: Target, outer: Target) -> bool:
    """Whether a target is part of an outer target, also for stages that join later."""
    return (
        outer.model in ("", inner.model)
        and (not outer.slots or bool(inner.slots and set(inner.slots) <= set(outer.slots)))
        and (not outer.stages or bool(inner.stages and set(inner.stages) <= set(outer.stages)))
    )


def _put(record: PauseRecord) -> Put:
    return Put("pause", record.pause.operation_id, record.SerializeToString())
