"""The slots and models of the fleet, the process in each slot, and the state of each stage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
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
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.command_stream.commander import Commander
from rlctl.contract import min_healthy
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.fleet.kept_pauses import Pauses, covers
from rlctl.coordinator.fleet.observer import Observer
from rlctl.coordinator.fleet.replaced_leases import Formers
from rlctl.coordinator.fleet.routing_followers import Followers
from rlctl.coordinator.journal.records import parsed
from rlctl.ports import Clock, Delete, Journal, Put
from rlctl.v1 import common_pb2
from rlctl.v1.common_pb2 import (
    ErrorDetail,
    PauseMode,
    ResponseHeader,
    StageState,
    Target,
    WeightVersion,
    WorkerCoordinates,
)
from rlctl.v1.fleet_pb2 import (
    FLEET_EVENT_KIND_CHANGED,
    FLEET_EVENT_KIND_SNAPSHOT,
    Capabilities,
    EngineFailure,
    Fleet,
    FleetEvent,
    Model,
    Pause,
    Stage,
    StageRegistration,
    StageReport,
)
from rlctl.v1.journal_pb2 import ModelRecord, SlotRecord
from rlctl.v1.results_pb2 import ExcludedStage

log = logging.getLogger(__name__)

_ABSENT = (
    common_pb2.STAGE_STATE_JOINING,
    common_pb2.STAGE_STATE_UNREACHABLE,
    common_pb2.STAGE_STATE_DRAINING,
    common_pb2.STAGE_STATE_RETIRED,
)

NOT_THERE = "not there"
"""Reason of an excluded stage that was absent."""

_UNLINKED = (common_pb2.STAGE_STATE_JOINING, common_pb2.STAGE_STATE_UNREACHABLE)

REST = 5
"""Rest of a watch, as a multiple of the time that the comparison of the fleet took. With a thousand changing stages,
comparisons would otherwise take half of the coordinator's time."""


MOST_NAMED = 3
"""Most stages that the error of a request without targets names."""

RETIRED = 1024
"""Retired slots that the journal remembers, so that a process that returns to a slot is a later incarnation. Slots
named after pods would otherwise accumulate without limit."""

MAIN = "main"
"""Logical stage of a registration that names no logical stage."""

NONE: frozenset[str] = frozenset()

_MIXTURE = "its weights are a mixture; a full update or a heal clears it"
"""For a DIRTY stage whose cause is no longer known."""


@dataclass(eq=False)
class Slot:
    """A slot and the process that fills it.

    Attributes:
        record: the journaled record.
        verbs: verbs that the stage supports.
        workers: ranks of the stage.
        commander: the link, if any.
        report: latest report of the present incarnation.
        lease_until: latest end of the stage's serving lease, on the clock's ``now``.
        gone: nothing listens at the stage's address, or the stage deregisters. Once replaced, the stage serves nothing.
        silent_from: number of a grant. During a publish, a confirmation of this or a later grant says that the stage
            serves nothing. 0: no confirmation counts, the lease must end.
        restoring: a heal or update is bringing the stage to the published version. Until then the stage
            may not serve that version, regardless of reports.
        late: the stage joined after the served version was published, or was excluded. The stage may be STALE only
            briefly.
        leaving: number of callers that are about to take the stage out of service (:meth:`Roster.leaving`).
        heal_at: time on the clock's ``now`` of the stage's heal, or of the next try after a failed heal; None: no heal
            is planned.
        heal_time: the same as wall time, for people.
        unhealable: cause why a stage that needs a heal has no heal source, or "".
        misread: a heal from the version's checkpoint failed. The next heal prefers a stage as source.
        engine_failure: failure of the process, as the launcher reports it; None: no report.
        pause: the pause by name of all requests that is in force for the slot, or None.
        adapter_pauses: the pauses by name of single adapters that are in force for the slot, by adapter.
        away: cause of the missing link, if known, or "".
        taken: the stage obeys the epoch of another fleet's coordinator.
        withheld_adapters: adapters that the last grant withheld, because the slot owed a pause by name of them.
        in_hand: number of running operations by name that pause or continue the slot, by adapter. The outcome
            decides the slot's pause.
        undecided: number of these operations for each pause in force that they may put in force or end. The slot does
            not owe such a pause until the operations have ended. A pause that began after a continue is not counted.
        continuing: number of running ContinueGenerations, by adapter. Such a stage may report a
            pause and be about to generate.
    """

    record: SlotRecord
    name: str = field(init=False)
    model: str = field(init=False)
    stage: str = field(init=False)
    verbs: frozenset[str] = field(init=False)
    workers: Sequence[WorkerCoordinates] = field(init=False)
    commander: Commander | None = None
    report: StageReport | None = None
    lease_until: float = float("-inf")
    gone: bool = False
    silent_from: int = 0
    restoring: bool = False
    late: bool = True
    leaving: int = 0
    heal_at: float | None = None
    heal_time: Timestamp | None = None
    unhealable: str = ""
    misread: bool = False
    engine_failure: EngineFailure | None = None
    pause: Pause | None = None
    adapter_pauses: Mapping[str, Pause] = field(default_factory=dict)
    withheld_adapters: Sequence[str] = ()
    in_hand: Counter[str] = field(default_factory=Counter)
    undecided: Counter[str] = field(default_factory=Counter)
    continuing: Counter[str] = field(default_factory=Counter)
    away: str = ""
    taken: bool = False

    def __post_init__(self) -> None:
        """Copy fields of the record. Reading the messages for each of a thousand slots in every operation is slow."""
        registration = self.record.registration
        self.name, self.model, self.stage = registration.slot, registration.model, registration.stage or MAIN
        self.verbs = frozenset(registration.capabilities.verbs)
        self.workers = list(registration.layout.workers)

    def fill(self, registration: StageRegistration) -> None:
        """Store a further registration of the same process. The content may differ."""
        _fill(self.record, registration)
        self.__post_init__()

    @property
    def held(self) -> bool:
        """Whether an update paused generation, as opposed to a pause by name."""
        return self.report is not None and self.report.paused and bool(self.report.paused_by_update)

    def pauses_in(self, mode: PauseMode.ValueType) -> bool:
        """Whether the stage supports a pause mode. A stage that publishes no modes may support any mode."""
        modes = self.capabilities.pause_modes
        return not modes or mode in modes

    @property
    def owes_pause(self) -> bool:
        """Whether the stage has yet to carry out a pause by name in force. Until then the stage may serve nothing."""
        if self.pause is None or self.undecided[self.pause.operation_id] or self.has_paused or self.report is None:
            return False
        return "PauseGeneration" in self.verbs

    @property
    def has_paused(self) -> bool:
        """Whether the stage reports a pause, and no operation is about to continue generation."""
        return self.report is not None and self.report.paused and not self.continuing[""]

    def has_paused_adapter(self, adapter: str) -> bool:
        """Whether the stage reports a pause of an adapter, and no operation is about to continue the adapter."""
        return adapter in self.paused_adapters and not self.continuing[adapter]

    @property
    def paused_adapters(self) -> frozenset[str]:
        """Names of the adapters that the stage reports as paused."""
        return frozenset(paused.name for paused in self.report.paused_adapters) if self.report is not None else NONE

    @property
    def owed_adapters(self) -> list[str]:
        """Adapters whose pause by name is in force and not yet carried out. Until then the stage may not serve them."""
        if not self.adapter_pauses or self.report is None:
            return []
        due_names = [name for name, pause in self.adapter_pauses.items() if not self.undecided[pause.operation_id]]
        return [name for name in due_names if not self.has_paused_adapter(name)]

    @property
    def unkept_adapters(self) -> list[str]:
        """Adapters that the stage keeps paused without a pause by name in force."""
        pauses = self.adapter_pauses
        return [name for name in sorted(self.paused_adapters) if name not in pauses and not self.in_hand[name]]

    @property
    def capabilities(self) -> Capabilities:
        return self.record.registration.capabilities

    @property
    def state(self) -> StageState.ValueType:
        """State that the roster decides, otherwise the state of the last report."""
        if not self.listed:
            return common_pb2.STAGE_STATE_RETIRED
        if not self.linked and self.engine_failure is not None and self.engine_failure.given_up:
            return common_pb2.STAGE_STATE_FAILED
        if self.record.retired:
            return common_pb2.STAGE_STATE_UNREACHABLE
        if self.commander is not None and self.commander.lost:
            return common_pb2.STAGE_STATE_UNREACHABLE
        if self.report is None:
            return common_pb2.STAGE_STATE_JOINING
        return common_pb2.STAGE_STATE_UNREACHABLE if self.commander is None else self.report.state

    @property
    def listed(self) -> bool:
        """Whether the slot is part of the fleet. A launcher that reports a failed engine is going to fill the slot
        again, although the rest of the engine has deregistered.
        """
        return not self.record.retired or self.engine_failure is not None

    @property
    def absent(self) -> bool:
        """Whether a new target set excludes the stage. An engine that is not started again is FAILED without a link."""
        return self.state in _ABSENT or not self.linked

    @property
    def linked(self) -> bool:
        return self.commander is not None and not self.commander.lost

    @property
    def failure(self) -> EngineFailure | None:
        """Failure of the engine: from the stage's report while the stage is linked, else from the launcher."""
        if not self.linked:
            return self.engine_failure
        if self.report is not None and self.report.HasField("engine_failure"):
            return self.report.engine_failure
        return None

    @property
    def quarantine(self) -> ErrorDetail | None:
        """Cause of the quarantine: the coordinator's, else the stage's own."""
        if self.record.HasField("quarantine"):
            return self.record.quarantine
        if self.report is not None and self.report.HasField("quarantine"):
            return self.report.quarantine
        return None

    def dead_ranks(self) -> list[int]:
        """Ranks with ended processes. The stage then needs a restart."""
        if self.report is None:
            return []
        return [rank.coordinates.rank for rank in self.report.ranks if not rank.alive]

    def not_routable(self) -> str:
        """Return why the stage is not routable, or ""."""
        why = self._obstacle()
        return f"{why}, UNHEALABLE: {self.unhealable}" if why and self.unhealable else why

    def _obstacle(self) -> str:
        state = self.state
        if state != common_pb2.STAGE_STATE_READY:
            name = StageState.Name(state).removeprefix("STAGE_STATE_")
            if self.failure is not None:
                return f"{name}: {failed(self.failure)}"
            if state in _UNLINKED and self.away:
                return f"{name}: {self.away}"
            if state == common_pb2.STAGE_STATE_FAILED and (dead := self._dead_rank()):
                return f"{name}: {dead}"
            if state == common_pb2.STAGE_STATE_DIRTY:
                return f"{name}: {self.quarantine.message if self.quarantine is not None else _MIXTURE}"
            return name
        if not self.record.enabled:
            reason = self.record.disabled_reason
            return f"disabled: {reason}" if reason else "disabled"
        if self.quarantine is not None:
            return f"quarantined: {self.quarantine.message}"
        if self.report is None or not self.report.lease_held:
            return "no serving lease"
        if self.leaving:
            return "about to be disabled, paused or written to"
        if self.owes_pause:
            return f"about to be paused: pause {self.pause.operation_id if self.pause else ''} is in force"
        return ""

    def _dead_rank(self) -> str:
        """Return the first lost rank with the cause, or "". A quarantine may be of an earlier failure."""
        ranks = self.report.ranks if self.report is not None else ()
        return next((f"rank {rank.coordinates.rank}: {rank.reason}" for rank in ranks if not rank.alive), "")


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
            _fill(record, registration)
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
                    excluded.append(ExcludedStage(slot=slot.name, state=slot.state, reason=NOT_THERE))
                continue
            targets.append(slot)
        if not targets:
            raise self._none_there(target)
        return targets, excluded

    def _none_there(self, target: Target) -> RlctlError:
        """Return the error of a target without an addressable stage."""
        absent = [slot for slot in self.covered(target) if slot.listed]
        causes = "; ".join(f"{slot.name} is {slot.not_routable()}" for slot in absent[:MOST_NAMED])
        if absent and all(slot.taken for slot in absent):
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
        return Fleet(
            header=self.header(),
            revision=self._revision,
            models=[self._model(m) for name, m in sorted(self.models.items()) if model in ("", name)],
            stages=[
                self._stage(slot) for _, slot in sorted(self.slots.items()) if model in ("", slot.model) and slot.listed
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
                await self.told(models)
            yield
        finally:
            for slot in routable:
                slot.leaving -= 1
            if routable:
                self.changed()

    async def told(self, models: Collection[str]) -> None:
        """Wake the watchers after a change. Return when the routing followers of the models have confirmed it or are
        late.
        """
        self.changed()
        await self.followers.taken_in(self._revision, models)

    async def watch(self, model: str = "", watch_id: str = "") -> AsyncGenerator[FleetEvent, None]:
        """Yield a snapshot, then changes. Bursts are merged. With ``watch_id`` the caller confirms the changes."""
        previous: dict[str, bytes] = {}
        with self._watching() as queue, self.followers.following(watch_id, model) as follower:
            fleet = self.fleet(model)
            _difference(fleet, previous)
            self.followers.looked(follower, fleet.revision, told=True)
            yield FleetEvent(kind=FLEET_EVENT_KIND_SNAPSHOT, fleet=fleet, time=self._clock.wall())
            while not self._closed:
                await queue.get()
                began = self._clock.now()
                changed = _difference(self.fleet(model), previous)
                rest_s = REST * (self._clock.now() - began)
                new = bool(changed.models or changed.stages)
                self.followers.looked(follower, changed.revision, told=new)
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

    def _model(self, model: ModelState) -> Model:
        return Model(
            name=model.record.name,
            updatable=model.record.updatable,
            latest=model.record.latest,
            admitted=model.admitted,
            model_digest=model.record.model_digest,
            update_id=model.update_id,
            update_owner=model.update_owner,
            trainer_incarnation=model.record.trainer_incarnation,
            checkpoint=model.record.checkpoint,
            adapters=model.record.adapters,
            verification=model.record.verification if model.record.HasField("verification") else None,
            update_lease=duration(max(0.0, model.lease_until - self._clock.now()))
            if model.lease_until is not None
            else None,
            min_healthy=model.record.min_healthy if model.record.min_healthy.WhichOneof("limit") else None,
            min_healthy_stages=self.min_healthy(model),
        )

    def _stage(self, slot: Slot) -> Stage:
        heard = self._clock.now() - slot.commander.last_heard if slot.commander else None
        obstacle = slot.not_routable()
        staging = slot.report is not None and slot.report.update_staged
        stage = Stage(
            registration=slot.record.registration,
            incarnation=slot.record.incarnation,
            state=slot.state,
            report=slot.report,
            enabled=slot.record.enabled,
            routable=not obstacle,
            not_routable=obstacle,
            quarantine=slot.quarantine,
            staging_update_id=slot.report.update_id if slot.report is not None and staging else "",
            last_heard=duration(heard) if heard is not None else None,
            unhealable=bool(slot.unhealable),
            engine_failure=slot.failure,
            disabled_reason=slot.record.disabled_reason,
            disable_time=slot.record.disable_time if slot.record.HasField("disable_time") else None,
            pause=slot.pause,
            adapter_pauses=[pause for _, pause in sorted(slot.adapter_pauses.items())],
            heal_time=slot.heal_time if slot.heal_at is not None and self._clock.now() < slot.heal_at else None,
        )
        if stage.HasField("report") and not slot.linked and self._clock.now() >= slot.lease_until:
            stage.report.lease_held = False  # the last report is older than the end of the lease
        return stage


def failed(failure: EngineFailure) -> str:
    """Describe a failure of an engine in one line."""
    if failure.given_up:
        return f"crash loop, not started again after {failure.failures} failures: {failure.reason}"
    if failure.failures > 1:
        return f"crash loop, {failure.failures} failures in a row: {failure.reason}"
    return failure.reason


def enable(record: SlotRecord, enabled: bool, reason: str, now: Timestamp) -> None:
    """Set the operator's mark, with reason and time."""
    if enabled:
        record.ClearField("disable_time")
    elif not record.HasField("disable_time"):
        record.disable_time.CopyFrom(now)
    record.enabled, record.disabled_reason = enabled, "" if enabled else reason


def _fill(record: SlotRecord, registration: StageRegistration) -> None:
    record.registration.CopyFrom(registration)
    record.retired = False
    record.ClearField("retire_time")


def _difference(fleet: Fleet, seen: dict[str, bytes]) -> Fleet:
    """Return the models and stages that differ from ``seen``, and update ``seen``."""
    changed = Fleet(header=fleet.header, revision=fleet.revision)
    for model in fleet.models:
        steady = Model()
        steady.CopyFrom(model)
        steady.ClearField("update_lease")
        content = steady.SerializeToString(deterministic=True)
        if seen.get("m:" + model.name) != content:
            seen["m:" + model.name] = content
            changed.models.add().CopyFrom(model)
    for stage in fleet.stages:
        quiet = Stage()
        quiet.CopyFrom(stage)
        quiet.ClearField("last_heard")
        content = quiet.SerializeToString(deterministic=True)
        if seen.get("s:" + stage.registration.slot) != content:
            seen["s:" + stage.registration.slot] = content
            changed.stages.add().CopyFrom(stage)
    keys = {"s:" + stage.registration.slot for stage in fleet.stages}
    for name in [name for name in seen if name.startswith("s:") and name not in keys]:
        # The stage has deregistered. Without this event a watcher would keep the stage.
        stage = changed.stages.add()
        stage.ParseFromString(seen.pop(name))
        stage.state, stage.routable, stage.not_routable = common_pb2.STAGE_STATE_RETIRED, False, "RETIRED"
    return changed


def slot_put(record: SlotRecord) -> Put:
    return Put("slot", record.registration.slot, record.SerializeToString())


def model_put(record: ModelRecord) -> Put:
    return Put("model", record.name, record.SerializeToString())


def names(slots: Sequence[Slot]) -> list[str]:
    return [slot.name for slot in slots]
