"""The slots and models of the fleet: registered, changed durably, selected by targets, and watched."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)

from rlctl.contract import min_healthy
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.fleet.fleet_messages import difference, model_message, stage_message
from rlctl.coordinator.fleet.kept_pauses import Pauses, covers
from rlctl.coordinator.fleet.model_state import ModelState, model_put
from rlctl.coordinator.fleet.observer import Observer
from rlctl.coordinator.fleet.replaced_leases import Formers
from rlctl.coordinator.fleet.routing_followers import Followers
from rlctl.coordinator.fleet.slot import MAIN, Slot, fill, slot_put
from rlctl.coordinator.journal.records import parsed
from rlctl.ports import Clock, Delete, Journal, Put
from rlctl.v1.common_pb2 import ErrorDetail, ResponseHeader, Target
from rlctl.v1.fleet_pb2 import (
    FLEET_EVENT_KIND_CHANGED,
    FLEET_EVENT_KIND_SNAPSHOT,
    Fleet,
    FleetEvent,
    StageRegistration,
)
from rlctl.v1.journal_pb2 import ModelRecord, SlotRecord
from rlctl.v1.results_pb2 import ExcludedStage

log = logging.getLogger(__name__)

ABSENT = "absent"
"""Reason of an excluded stage that was absent."""

REST = 5
"""Rest of a watch, as a multiple of the time that the comparison of the fleet took. With a thousand changing stages,
comparisons would otherwise take half of the coordinator's time."""


MOST_NAMED = 3
"""Most stages that the error of a request without targets names."""

RETIRED = 1024
"""Retired slots that the journal remembers, so that a process that returns to a slot is a later incarnation. Slots
named after pods would otherwise accumulate without limit."""


class Roster:
    """Slots and models, stored in the journal and watched by clients."""

    def __init__(self, journal: Journal, clock: Clock, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self._journal = journal
        self._clock = clock
        self.slots: dict[str, Slot] = {}
        self.models: dict[str, ModelState] = {}
        self.epoch = 0
        self.first_sequence = 0
        """First sequence of models without a version (``FleetRecord`` of the journal)."""
        self._revision = 0
        self._watchers: dict[asyncio.Queue[None], None] = {}
        self.followers = Followers()
        self.formers = Formers()
        self.pauses = Pauses(journal, self._pauses_changed)
        self._closed = False
        self.publishing = asyncio.Lock()
        """Locked from the read of a model's record to the write, so that no other task changes the record meanwhile."""
        self._writing = asyncio.Lock()
        """Locked while slot records are written, so that two changes of a record do not undo each other."""
        self._unrecorded: dict[Slot, None] = {}
        """Quarantined slots without a journaled quarantine."""

    def load(self) -> None:
        for name, body in self._journal.read("slot"):
            record = parsed("slot", name, body, SlotRecord)
            self.slots[record.registration.slot] = Slot(record)
        for name, body in self._journal.read("model"):
            model = parsed("model", name, body, ModelRecord)
            admitted = [model.latest] if model.latest.sequence else []
            self.models[name] = ModelState(model, admitted)
        self.pauses.load()
        self._pauses_changed()

    async def register(self, registration: StageRegistration) -> Slot:
        """Fill a slot, durably. The same boot id keeps its incarnation; a new boot id gets the next incarnation."""
        async with self._writing:
            slot = self.slots.get(registration.slot)
            same = slot is not None and slot.record.registration.boot_id == registration.boot_id
            record = SlotRecord(incarnation=slot.record.incarnation + 1 if slot else 1, enabled=True)
            if slot is not None:
                record.enabled, record.disabled_reason = slot.record.enabled, slot.record.disabled_reason
                if slot.record.HasField("disable_time"):
                    record.disable_time.CopyFrom(slot.record.disable_time)
                record.unseen = True
            if slot is not None and same:
                record.CopyFrom(slot.record)
            fill(record, registration)
            changes = [slot_put(record)]
            model = self.models.get(registration.model)
            if model is None:
                fresh = ModelRecord(
                    name=registration.model, updatable=not registration.frozen, first_sequence=self.first_sequence
                )
                model = ModelState(fresh)
                changes.append(model_put(model.record))
            if slot is None or (slot.model, slot.stage) == (registration.model, registration.stage or MAIN):
                await self._journal.write(changes)
            else:
                await self.pauses.refill(slot.name, lambda puts: self._journal.write([*changes, *puts]))
            self.models.setdefault(registration.model, model)
            if slot is None or not same:
                former, slot = slot, Slot(record)
                log.info("%s: incarnation %d at %s", slot.name, record.incarnation, registration.address)
                self.slots[registration.slot] = slot
                self._take_pause(slot)
                if former is not None and not former.gone:
                    address = former.record.registration.address
                    self.formers.add(address, former.model, former.lease_until, self._clock.now(), former.name)
            else:
                slot.fill(registration)
                self._take_pause(slot)
        self.changed()
        return slot

    def covered(self, target: Target) -> list[Slot]:
        """Return the slots of a target, in any state, also retired slots."""
        return [slot for slot in self.slots.values() if covers(target, slot)]

    def _take_pause(self, slot: Slot) -> None:
        pauses = {scope: record.pause for scope, record in self.pauses.of(slot).items()}
        slot.pause = pauses.pop("", None)
        slot.adapter_pauses = pauses

    def _pauses_changed(self) -> None:
        for slot in self.slots.values():
            self._take_pause(slot)
        self.changed()

    async def change(
        self,
        slots: Collection[Slot],
        mutate: Callable[[SlotRecord], object],
        write: Callable[[Sequence[Put]], Awaitable[None]] | None = None,
    ) -> None:
        """Change records of slots, durably first. ``write`` journals the changed records, with further puts.

        A slot that a new process has filled meanwhile is not changed.
        """
        async with self._writing:
            changed = {}
            for slot in slots:
                record = SlotRecord()
                record.CopyFrom(slot.record)
                mutate(record)
                if self.slots.get(slot.name) is slot and record != slot.record:
                    changed[slot] = slot_put(record)
            if changed or write is not None:
                await (write or self._journal.write)(list(changed.values()))
            for slot in changed:
                mutate(slot.record)
        self.changed()

    async def retire(self, slot: Slot) -> None:
        """Retire a slot. Beyond ``RETIRED`` retired slots, forget the oldest whose serving leases have ended."""
        time = self._clock.wall()

        def leave(record: SlotRecord) -> None:
            if not record.retired:
                record.retired = True
                record.retire_time.CopyFrom(time)

        async def write(puts: Sequence[Put]) -> None:
            retired = [other for other in self.slots.values() if other.record.retired and other is not slot]
            retired.sort(key=lambda other: other.record.retire_time.ToNanoseconds())
            now = self._clock.now()
            oldest = [other for other in retired[: max(0, len(retired) + 1 - RETIRED)] if now >= other.lease_until]
            await self._journal.write([*puts, *(Delete("slot", other.name) for other in oldest)])
            for other in oldest:
                del self.slots[other.name]

        await self.change([slot], leave, write)

    async def lift_quarantine(
        self, slots: Collection[Slot], write: Callable[[Sequence[Put]], Awaitable[None]] | None = None
    ) -> None:
        """End the present quarantines of slots, with ``write`` as in :meth:`change`. Later quarantines stay."""
        # Compared as messages: bytes of a copy may differ, since maps have no order.
        quarantines = {slot.name: ErrorDetail.FromString(slot.record.quarantine.SerializeToString()) for slot in slots}

        def lift(record: SlotRecord) -> None:
            if record.quarantine == quarantines[record.registration.slot]:
                record.ClearField("quarantine")

        await self.change(slots, lift, write)

    async def quarantine(self, causes: Mapping[Slot, ErrorDetail]) -> None:
        """Take stages out of routing until a full update or a heal has been applied to them.

        A slot that a new process has filled is not changed. The quarantine is in force at once, also if the journal
        fails. Raises JOURNAL_FAILED then.
        """
        present = {slot: cause for slot, cause in causes.items() if self.slots.get(slot.name) is slot}
        for slot, cause in present.items():
            if slot.record.quarantine != cause:
                log.warning("%s is quarantined: %s: %s", slot.name, cause.reason, " ".join(cause.message.split()))
                self.observer.quarantined(slot.model, cause.reason)
            slot.record.quarantine.CopyFrom(cause)
        if present:
            self.changed()
            await self._record(present)

    async def record_quarantines(self) -> None:
        """Journal the quarantines whose first write failed. Raises JOURNAL_FAILED if the write fails again."""
        if self._unrecorded:
            await self._record(list(self._unrecorded))

    async def _record(self, quarantined: Collection[Slot]) -> None:
        self._unrecorded |= dict.fromkeys(quarantined)
        async with self._writing:
            await self._journal.write(
                [slot_put(slot.record) for slot in quarantined if self.slots.get(slot.name) is slot]
            )
        for slot in quarantined:
            self._unrecorded.pop(slot, None)

    def slot(self, name: str, field_path: str = "slot") -> Slot:
        """Return the slot, or raise STAGE_NOT_FOUND."""
        try:
            return self.slots[name]
        except KeyError:
            slot_names = ", ".join(sorted(self.slots)) or "none"
            raise Reason.STAGE_NOT_FOUND.error(
                f"no stage fills slot {name!r}; there are: {slot_names}", field=field_path
            ) from None

    def model(self, name: str, field_path: str = "model") -> ModelState:
        """Return the model, or raise MODEL_NOT_FOUND."""
        try:
            return self.models[name]
        except KeyError:
            model_names = ", ".join(sorted(self.models)) or "none"
            raise Reason.MODEL_NOT_FOUND.error(
                f"no stage serves model {name!r}; there are: {model_names}", field=field_path
            ) from None

    def of_model(self, model: ModelState) -> list[Slot]:
        """Return the slots of a model that are part of the fleet."""
        return [slot for slot in self.slots.values() if slot.model == model.record.name and slot.listed]

    def min_healthy(self, model: ModelState) -> int:
        """Return the number of stages that voluntary disruptions leave routable; 0: no limit."""
        minimum = model.record.min_healthy
        return min_healthy.limit(minimum, len(self.of_model(model)) if minimum.percent else 0)

    def select(self, target: Target) -> tuple[list[Slot], list[ExcludedStage]]:
        """Freeze a target set: (targets in slot order, excluded stages). Raises on unknown names and without targets.

        A slot that the target names is never excluded: an unreachable stage gets an outcome.
        """
        if target.model:
            self.model(target.model, "header.target.model")
        for index, name in enumerate(target.slots):
            slot = self.slot(name, f"header.target.slots[{index}]")
            if target.model and slot.model != target.model:
                raise Reason.STAGE_NOT_FOUND.error(
                    f"slot {name!r} serves {slot.model!r}, not {target.model!r}",
                    field=f"header.target.slots[{index}]",
                )
        if target.stages:
            self._refuse_unknown_stages(target)
        targets, excluded = [], []
        for _, slot in sorted(self.slots.items()):
            if not covers(target, slot):
                continue
            if slot.absent and not target.slots:
                if slot.listed:
                    excluded.append(ExcludedStage(slot=slot.name, state=slot.state, reason=ABSENT))
                continue
            targets.append(slot)
        if not targets:
            raise self._none_there(target)
        return targets, excluded

    def _none_there(self, target: Target) -> RlctlError:
        """Return the error of a target without an addressable stage."""
        absent = [slot for slot in self.covered(target) if slot.listed]
        causes = "; ".join(f"{slot.name} is {slot.not_routable()}" for slot in absent[:MOST_NAMED])
        if absent and all(slot.foreign_epoch for slot in absent):
            return Reason.EPOCH_FENCED.error(f"no stage obeys this coordinator: {causes}", field="header.target")
        return Reason.NO_TARGETS.error("no target is available" + f": {causes}" * bool(causes))

    def _refuse_unknown_stages(self, target: Target) -> None:
        stages = {slot.stage for slot in self.slots.values()}
        for index, name in enumerate(target.stages):
            if name not in stages:
                raise Reason.STAGE_NOT_FOUND.error(
                    f"no logical stage is called {name!r}; there are: {', '.join(sorted(stages))}",
                    field=f"header.target.stages[{index}]",
                )

    # Watching.

    def header(self) -> ResponseHeader:
        return ResponseHeader(fleet_epoch=self.epoch, served_by="coordinator", observed_at=self._clock.wall())

    def fleet(self, model: str = "") -> Fleet:
        """Return the state of the fleet, or of a single model. Raises MODEL_NOT_FOUND."""
        if model:
            self.model(model)
        now = self._clock.now()
        return Fleet(
            header=self.header(),
            revision=self._revision,
            models=[
                model_message(m, now, self.min_healthy(m))
                for name, m in sorted(self.models.items())
                if model in ("", name)
            ],
            stages=[
                stage_message(slot, now)
                for _, slot in sorted(self.slots.items())
                if model in ("", slot.model) and slot.listed
            ],
        )

    def changed(self) -> None:
        """Wake the watchers after a possible change."""
        self._revision += 1
        for queue in self._watchers:
            if queue.empty():
                queue.put_nowait(None)

    def close(self) -> None:
        self._closed = True
        self.changed()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds. The condition is checked now and after every change."""
        with self._watching() as queue:
            while not condition():
                await queue.get()

    @contextlib.asynccontextmanager
    async def leaving(self, slots: Collection[Slot]) -> AsyncIterator[None]:
        """Mark routable stages as about to leave service, and wait until routing followers have confirmed this."""
        models = {slot.model for slot in slots}
        routable = [slot for slot in slots if not slot.not_routable()] if self.followers.awaited(models) else []
        for slot in routable:
            slot.leaving += 1
        try:
            if routable:
                await self.announce(models)
            yield
        finally:
            for slot in routable:
                slot.leaving -= 1
            if routable:
                self.changed()

    async def announce(self, models: Collection[str]) -> None:
        """Wake the watchers after a change. Wait for the routing followers of the models, except late followers."""
        self.changed()
        await self.followers.taken_in(self._revision, models)

    async def watch(self, model: str = "", watch_id: str = "") -> AsyncGenerator[FleetEvent, None]:
        """Yield a snapshot, then changes. Bursts are merged. With ``watch_id`` the caller confirms the changes."""
        previous: dict[str, bytes] = {}
        with self._watching() as queue, self.followers.following(watch_id, model) as follower:
            fleet = self.fleet(model)
            difference(fleet, previous)
            self.followers.looked(follower, fleet.revision, announced=True)
            yield FleetEvent(kind=FLEET_EVENT_KIND_SNAPSHOT, fleet=fleet, time=self._clock.wall())
            while not self._closed:
                await queue.get()
                began = self._clock.now()
                changed = difference(self.fleet(model), previous)
                rest_s = REST * (self._clock.now() - began)
                new = bool(changed.models or changed.stages)
                self.followers.looked(follower, changed.revision, announced=new)
                if new:
                    yield FleetEvent(kind=FLEET_EVENT_KIND_CHANGED, fleet=changed, time=self._clock.wall())
                await asyncio.sleep(rest_s)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[asyncio.Queue[None]]:
        """Yield a queue that has an item after a possible change."""
        queue: asyncio.Queue[None] = asyncio.Queue(maxsize=1)
        self._watchers[queue] = None
        try:
            yield queue
        finally:
            del self._watchers[queue]
