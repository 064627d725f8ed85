"""The metrics of a coordinator: events as observer, and the state of the fleet at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, typed
from rlctl.contract.verbs import offered_by
from rlctl.coordinator.fleet import disruptions
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.observer import Observer
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.service import Coordinator
from rlctl.coordinator.updates.manager import TRAINERS_UPDATE
from rlctl.metrics import definitions as m
from rlctl.metrics.exposition import Exposition, Sample
from rlctl.ports import Clock, Delete, Journal, Put
from rlctl.transport.handlers import Streaming, Unary
from rlctl.transport.tls.credentials import Tls
from rlctl.v1 import coordinator_pb2
from rlctl.v1.common_pb2 import (
    VERIFICATION_LEVEL_NONE,
    VERIFICATION_LEVEL_UNSPECIFIED,
    StageState,
    Transport,
    VerificationLevel,
)
from rlctl.v1.journal_pb2 import OperationRecord
from rlctl.v1.results_pb2 import OperationState, Phase, PhaseKind

OTHER_OPERATIONS = (TRAINERS_UPDATE, "CommitWeightUpdate", "HealStage")
"""Verbs of operations outside of the table of verbs."""

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]


class CoordinatorMetrics(Observer):
    """Counts events, and serves counts and the state of a coordinator."""

    def __init__(self, clock: Clock, tls: Tls | None) -> None:
        self._clock = clock
        self._tls = tls
        self._coordinator: Coordinator | None = None
        self._exposition = Exposition(m.of(m.COORDINATOR), self._state)
        for number in VerificationLevel.values():
            if number not in (VERIFICATION_LEVEL_UNSPECIFIED, VERIFICATION_LEVEL_NONE):
                self._exposition.counter(m.VERIFICATION_FAILURES, _level_name(number))
        for verb in (*(verb.name for verb in offered_by("CoordinatorService") if verb.mutating), *OTHER_OPERATIONS):
            for state in ("failed", "unknown"):
                self._exposition.counter(m.OPERATIONS, verb, state)

    async def start(self, coordinator: Coordinator, listen: str) -> str:
        """Serve the metrics. Returns the bound address. Raises FIELD_INVALID."""
        self._coordinator = coordinator
        return await self._exposition.start(listen)

    async def stop(self) -> None:
        await self._exposition.stop()

    def operation_ended(self, record: OperationRecord, took_s: float, traceparent: str) -> None:
        del traceparent
        operation = record.operation
        verb, state = operation.verb, OperationState.Name(operation.state).removeprefix("OPERATION_STATE_").lower()
        self._exposition.count(m.OPERATIONS, verb, state)
        self._exposition.observe(m.OPERATION_SECONDS, took_s, verb)
        if operation.HasField("pause_time"):
            self._exposition.observe(m.PAUSE_SECONDS, seconds(operation.pause_time), verb)
        if operation.error.reason == Reason.LEASE_EXPIRED.name:
            self._exposition.count(m.EXPIRED_LEASES)
        for phase in record.timeline.phases:
            self._count_phase(verb, phase)

    def _count_phase(self, verb: str, phase: Phase) -> None:
        kind = PhaseKind.Name(phase.kind).removeprefix("PHASE_KIND_").lower()
        self._exposition.observe(m.PHASE_SECONDS, seconds(phase.duration), verb, kind)
        arrived = Counter[Transport.ValueType]()
        for stage in phase.stages:
            arrived[stage.transport] += sum(rank.bytes for rank in stage.ranks)
            if stage.failed_level:
                self._exposition.count(m.VERIFICATION_FAILURES, _level_name(stage.failed_level))
        for transport, total in arrived.items():
            if total:
                name = Transport.Name(transport).removeprefix("TRANSPORT_").lower()
                self._exposition.count(m.UPDATE_BYTES, name, by=total)

    def fan_out_ended(self, verb: str, took_s: float) -> None:
        self._exposition.observe(m.FAN_OUT_SECONDS, took_s, verb)

    def quarantined(self, model: str, reason: str) -> None:
        self._exposition.count(m.QUARANTINES, model, reason)

    def measured(self, methods: Mapping[str, Unary | Streaming]) -> dict[str, Unary | Streaming]:
        """Return the methods of the service. Times and errors of unary methods are counted."""
        streams = {method.name for method in SERVICE.methods if method.server_streaming}
        return {name: method if name in streams else self._measured(name, method) for name, method in methods.items()}

    def _measured(self, name: str, method: Any) -> Unary:

        async def call(request: Message, remaining_s: float | None) -> Message:
            started = self._clock.now()
            try:
                answer: Message = await method(request, remaining_s)
                return answer
            except Exception as error:
                self._exposition.count(m.REFUSED_CALLS, name, typed(error).reason.name)
                raise
            finally:
                self._exposition.observe(m.CALL_SECONDS, self._clock.now() - started, name)

        return call

    def journal(self, journal: Journal) -> Journal:
        """Return a journal that measures writes."""
        return _MeasuredJournal(journal, self._exposition, self._clock)

    def _state(self) -> Iterator[Sample]:
        if self._tls is not None:
            yield m.CERTIFICATE_EXPIRY, (), self._tls.material.expires.timestamp()
        if self._coordinator is None:
            return
        roster = self._coordinator.roster
        yield m.EPOCH, (), roster.epoch
        running = Counter(operation.verb for operation in self._coordinator.operations.running())
        for verb, count in running.items():
            yield m.RUNNING_OPERATIONS, (verb,), count
        for model in roster.models.values():
            yield from _of_model(model)
            yield m.MIN_HEALTHY, (model.record.name,), roster.min_healthy(model)
            yield m.HEALTHY, (model.record.name,), len(disruptions.healthy(roster, model))
        listed = [slot for slot in roster.slots.values() if slot.listed]
        for (model_name, state), count in Counter((slot.model, _state_of(slot)) for slot in listed).items():
            yield m.STAGES, (model_name, state), count
        for slot in listed:
            yield from _of_stage(slot, roster.models[slot.model], self._clock.now())


def _level_name(level: VerificationLevel.ValueType) -> str:
    return VerificationLevel.Name(level).removeprefix("VERIFICATION_LEVEL_").lower()


def _of_model(model: ModelState) -> Iterator[Sample]:
    name = model.record.name
    yield m.MODEL_VERSION, (name,), model.record.latest.sequence
    yield m.OPEN_UPDATE, (name,), bool(model.update_id)
    if model.record.HasField("publish_time"):
        yield m.PUBLISH_TIME, (name,), model.record.publish_time.ToMilliseconds() / 1000


def _of_stage(slot: Slot, model: ModelState, now: float) -> Iterator[Sample]:
    labels = (slot.model, slot.name)
    yield m.STAGE_STATE, (*labels, _state_of(slot)), 1
    yield m.ROUTABLE, labels, not slot.not_routable()
    yield m.QUARANTINED, labels, slot.quarantine is not None
    yield m.UNHEALABLE, labels, bool(slot.unhealable)
    yield m.INCARNATIONS, labels, slot.record.incarnation
    yield m.ENGINE_FAILURES, labels, slot.failure.failures if slot.failure is not None else 0
    yield m.LEASED, labels, slot.linked and slot.report is not None and slot.report.lease_held
    if slot.report is not None:
        yield m.VERSION_LAG, labels, model.record.latest.sequence - slot.report.weight_version.sequence
    if slot.commander is not None and not slot.commander.lost:
        yield m.LAST_HEARD, labels, now - slot.commander.last_heard


def _state_of(slot: Slot) -> str:
    return StageState.Name(slot.state).removeprefix("STAGE_STATE_").lower()


class _MeasuredJournal:
    """Measures the writes of a journal."""

    def __init__(self, journal: Journal, exposition: Exposition, clock: Clock) -> None:
        self._clock = clock
        self._journal = journal
        self._exposition = exposition
        self.read = journal.read
        self.owned = journal.owned

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        started = self._clock.now()
        try:
            await self._journal.write(changes)
        finally:
            self._exposition.observe(m.JOURNAL_SECONDS, self._clock.now() - started)
