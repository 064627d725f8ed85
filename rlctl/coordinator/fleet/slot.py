"""A slot, the process that fills it, and the state of the stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.command_stream.commander import Commander
from rlctl.ports import Put
from rlctl.v1 import common_pb2
from rlctl.v1.common_pb2 import ErrorDetail, PauseMode, StageState, WorkerCoordinates
from rlctl.v1.fleet_pb2 import Capabilities, EngineFailure, Pause, StageRegistration, StageReport
from rlctl.v1.journal_pb2 import SlotRecord

_ABSENT = (
    common_pb2.STAGE_STATE_JOINING,
    common_pb2.STAGE_STATE_UNREACHABLE,
    common_pb2.STAGE_STATE_DRAINING,
    common_pb2.STAGE_STATE_RETIRED,
)

_UNLINKED = (common_pb2.STAGE_STATE_JOINING, common_pb2.STAGE_STATE_UNREACHABLE)

MAIN = "main"
"""Logical stage of a registration that names no logical stage."""

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
        keyed_digests: model digest of the stage's first weights by the key of a version; "": it could not be computed.
        misread: a heal from the version's checkpoint failed. The next heal prefers a stage as source.
        engine_failure: failure of the process, as the launcher reports it; None: no report.
        pause: the pause by name of all requests that is in force for the slot, or None.
        adapter_pauses: the pauses by name of single adapters that are in force for the slot, by adapter.
        away: cause of the missing link, if known, or "".
        foreign_epoch: the stage obeys the epoch of another fleet's coordinator.
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
    keyed_digests: Mapping[bytes, str] = field(default_factory=dict)
    misread: bool = False
    engine_failure: EngineFailure | None = None
    pause: Pause | None = None
    adapter_pauses: Mapping[str, Pause] = field(default_factory=dict)
    withheld_adapters: Sequence[str] = ()
    in_hand: Counter[str] = field(default_factory=Counter)
    undecided: Counter[str] = field(default_factory=Counter)
    continuing: Counter[str] = field(default_factory=Counter)
    away: str = ""
    foreign_epoch: bool = False

    def __post_init__(self) -> None:
        """Copy fields of the record. Reading the messages for each of a thousand slots in every operation is slow."""
        registration = self.record.registration
        self.name, self.model, self.stage = registration.slot, registration.model, registration.stage or MAIN
        self.verbs = frozenset(registration.capabilities.verbs)
        self.workers = list(registration.layout.workers)

    def fill(self, registration: StageRegistration) -> None:
        """Store a further registration of the same process. The content may differ."""
        fill(self.record, registration)
        self.__post_init__()

    @property
    def paused_by_update(self) -> bool:
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
        return (
            frozenset(paused.name for paused in self.report.paused_adapters) if self.report is not None else frozenset()
        )

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
                return f"{name}: {_failed(self.failure)}"
            if state in _UNLINKED and self.away:
                return f"{name}: {self.away}"
            if state == common_pb2.STAGE_STATE_FAILED and (dead := self.dead_rank()):
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

    def dead_rank(self) -> str:
        """Return the first lost rank with the cause, or "". A quarantine may be of an earlier failure."""
        ranks = self.report.ranks if self.report is not None else ()
        return next((f"rank {rank.coordinates.rank}: {rank.reason}" for rank in ranks if not rank.alive), "")


def _failed(failure: EngineFailure) -> str:
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


def fill(record: SlotRecord, registration: StageRegistration) -> None:
    record.registration.CopyFrom(registration)
    record.retired = False
    record.ClearField("retire_time")


def slot_put(record: SlotRecord) -> Put:
    return Put("slot", record.registration.slot, record.SerializeToString())


def names(slots: Sequence[Slot]) -> list[str]:
    return [slot.name for slot in slots]
