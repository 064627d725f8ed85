"""The coordinator as a process: a service at an address, with the journal in a file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from rlctl.contract.access import AUDITED, COORDINATOR_RPCS, FOLLOWS, Method, refusal
from rlctl.contract.errors import QuotaExceeded, Reason, RlctlError
from rlctl.contract.scopes import calling, current_caller
from rlctl.contract.verbs import offered_by
from rlctl.coordinator.audit import KEPT_S, MOST_SLOTS
from rlctl.coordinator.fleet.observer import Observers
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.coordinator.service import Coordinator
from rlctl.coordinator.updates.manager import Graces
from rlctl.metrics.definitions import refuse_without_library
from rlctl.ports import Clock, SystemClock
from rlctl.traces.tracing import tracer
from rlctl.transport.denials import Denial, Denials
from rlctl.transport.handlers import Streaming, Unary, generic_handler
from rlctl.transport.links import GrpcDialer
from rlctl.transport.server import GrpcServer
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.identity import Role
from rlctl.transport.tls.peers import caller
from rlctl.v1 import coordinator_pb2
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK
from rlctl.v1.stage_pb2_grpc import StageServiceStub

if TYPE_CHECKING:
    from rlctl.coordinator.metrics import CoordinatorMetrics
    from rlctl.coordinator.traces import OperationTraces

log = logging.getLogger(__name__)

MOST_STREAMS = {"WatchFleet": 256, "WatchOperation": 256, "BackupJournal": 2}
"""Most open streams of the callers of a host. An unread stream keeps a copy of the fleet or of the journal."""

_PART_BYTES = 1 << 20

_OFTEN = ("RegisterStage", "RenewLease", "ConfirmFleet", "GetOperation", "ListOperations", "GetFleet")
"""RPCs that programs repeat often, so that refusals are not logged here. The coordinator logs refused stages itself."""

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]


@dataclass(frozen=True)
class CoordinatorConfig:
    """Configuration of a coordinator. Fields without an explanation are options of ``rlctl coordinator``.

    Attributes:
        token: the fleet's bearer token, to guard the coordinator and to send to the stages.
        serving_lease_s: serving lease of a stage, in seconds.
        heal_by_hand: models whose stages are healed only on request. Stages of other models are healed automatically.
        topology: slots that may be filled, besides slots that an operator admits; None: every slot.
        graces: waits for trainers that may be gone.
        tls: certificate of a coordinator; None for plain text.
        audit_kept_s: lifetime of an audit record, in seconds.
    """

    journal: Path
    listen: str = "127.0.0.1:5080"
    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    serving_lease_s: float = 10.0
    heal_by_hand: Collection[str] = ()
    topology: Collection[str] | None = None
    graces: Graces = field(default_factory=Graces)
    tls: Tls | None = None
    metrics: str = ""
    access_file: str = ""
    audit_kept_s: float = KEPT_S


class CoordinatorServer:
    """A coordinator with a server.

    Attributes:
        denials: refused calls, for the audit.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        if config.tls is not None:
            config.tls.require(Role.COORDINATOR)
        self.config = config
        self.address = self.metrics_address = ""
        clock = SystemClock()
        self._metrics = _metrics(clock, config.tls) if config.metrics else None
        self._traces = _traces()
        self._journal = SqliteJournal(config.journal)
        self.coordinator = Coordinator(
            self._journal if self._metrics is None else self._metrics.journal(self._journal),
            GrpcDialer(StageServiceStub, config.token, config.tls, Role.STAGE),
            clock,
            lease_s=config.serving_lease_s,
            heal_by_hand=config.heal_by_hand,
            topology=config.topology,
            graces=config.graces,
            audit_kept_s=config.audit_kept_s,
            observer=Observers([observer for observer in (self._metrics, self._traces) if observer is not None]),
        )
        self._recording: set[asyncio.Task[None]] = set()
        self.denials = Denials(self._record_denial)
        implementations = {**methods(self.coordinator, self.denials), "BackupJournal": _watch(self.backup_journal)}
        if self._metrics is not None:
            implementations = self._metrics.measured(implementations)
        handler = generic_handler(SERVICE, implementations, most_streams=MOST_STREAMS)
        self._server = GrpcServer(
            [(SERVICE, handler)],
            token=config.token,
            access_file=config.access_file,
            insecure=config.insecure,
            tls=config.tls,
            denials=self.denials,
        )

    async def start(self) -> None:
        """Take over the fleet of the journal, then serve. Closes the journal after a failure."""
        try:
            await self.coordinator.start()
            if self._metrics is not None:
                self.metrics_address = await self._metrics.start(self.coordinator, self.config.metrics)
            self.address = await self._server.start(self.config.listen)
        except BaseException:
            await self._stop_metrics()
            await self.coordinator.stop()
            self._journal.close()
            raise

    def _record_denial(self, denial: Denial) -> None:
        identity = denial.identity
        record = coordinator_pb2.AuditRecord(
            caller=None if identity is None else identity.caller(),
            method=denial.method,
            denied=True,
            state=OPERATION_STATE_FAILED,
            reason=denial.error.reason.name,
            count=denial.count,
            host=denial.host,
        )
        task = asyncio.create_task(self.coordinator.audit.record(record))
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)

    async def backup_journal(self, request: coordinator_pb2.BackupJournalRequest) -> AsyncIterator[Message]:
        """Copy the journal into a temporary file, and send this file."""
        await self.coordinator.audit.record(_audit_record("BackupJournal", request))
        try:
            with tempfile.TemporaryDirectory(prefix="rlctl-journal-") as directory:
                copy = Path(directory) / "journal.db"
                copying = asyncio.create_task(asyncio.to_thread(self._journal.copy, copy))
                try:
                    await asyncio.shield(copying)
                except asyncio.CancelledError:
                    with contextlib.suppress(Exception):
                        await copying  # the thread of the copy writes into the directory
                    raise
                with copy.open("rb") as file:
                    while data := await asyncio.to_thread(file.read, _PART_BYTES):
                        yield coordinator_pb2.JournalPart(data=data)
        except OSError as error:
            raise Reason.JOURNAL_FAILED.error(
                f"the journal cannot be copied: {error}",
                next_step="Start the coordinator with TMPDIR at a directory that has room for a copy of the journal.",
            ) from error

    async def stop(self) -> None:
        """Refuse new calls, end open streams and operations, close the journal."""
        self.coordinator.roster.close()
        await self._server.stop()
        await self._stop_metrics()
        await self.coordinator.stop()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.stop)
        self._journal.close()

    async def _stop_metrics(self) -> None:
        if self._metrics is not None:
            await self._metrics.stop()


def _metrics(clock: Clock, tls: Tls | None) -> CoordinatorMetrics:
    """Return the metrics. Raises UNSUPPORTED without prometheus_client."""
    refuse_without_library()
    from rlctl.coordinator.metrics import CoordinatorMetrics  # loads prometheus_client

    return CoordinatorMetrics(clock, tls)


def _traces() -> OperationTraces | None:
    made_by = tracer("rlctl-coordinator")
    if made_by is None:
        return None
    from rlctl.coordinator.traces import OperationTraces  # loads opentelemetry

    return OperationTraces(made_by)


class _Refusals:
    """Logs refused calls. An immediate repeat of a refusal is not logged."""

    def __init__(self) -> None:
        self._last = ""

    def logged(self, name: str, method: Unary) -> Unary:
        """Return the method with logged refusals."""

        async def call(request: Message, remaining_s: float | None) -> Message:
            try:
                return await method(request, remaining_s)
            except RlctlError as error:
                line = f"{name} is refused: {' '.join(str(error).split())}"
                if line != self._last:
                    log.info("%s", line)
                self._last = line
                raise

        return call


def methods(coordinator: Coordinator, denials: Denials) -> dict[str, Unary | Streaming]:
    """Return the implementations of the service: verbs of the table, and a method of the coordinator for each other
    RPC.
    """
    refusals = _Refusals()
    implementations: dict[str, Any] = {
        verb.name: refusals.logged(verb.name, coordinator.verb) for verb in offered_by("CoordinatorService")
    }
    handlers: dict[str, Callable[[Any], Awaitable[Message]]] = {
        "RegisterStage": _of_own_slot(coordinator.register_stage, lambda request: request.registration.slot),
        "DeregisterStage": _of_own_slot(coordinator.deregister_stage, lambda request: request.slot),
        "BeginWeightUpdate": coordinator.begin_weight_update,
        "JoinWeightUpdate": coordinator.join_weight_update,
        "RetryWeightUpdate": coordinator.retry_weight_update,
        "CommitBatch": coordinator.commit_batch,
        "CommitWeightUpdate": coordinator.commit_weight_update,
        "AbortWeightUpdate": coordinator.abort_weight_update,
        "RenewLease": coordinator.renew_lease,
        "ReserveRequestId": coordinator.reserve_request_id,
        "GetOperation": coordinator.get_operation,
        "ListOperations": coordinator.list_operations,
        "ListAuditRecords": coordinator.list_audit_records,
        "CancelOperation": coordinator.cancel_operation,
        "GetFleet": coordinator.get_fleet,
        "ListVersions": coordinator.list_versions,
        "SetStageEnabled": coordinator.set_stage_enabled,
        "ReportEngineFailure": coordinator.report_engine_failure,
        "AdmitSlots": coordinator.admit_slots,
        "TakeOverStages": coordinator.take_over_stages,
        "SetHealing": coordinator.set_healing,
        "SetMinHealthy": coordinator.set_min_healthy,
        "ConfirmFleet": coordinator.confirm_fleet,
        "HealStage": coordinator.heal_stage,
    }
    watches: dict[str, Callable[[Any], AsyncIterator[Message]]] = {
        "WatchOperation": coordinator.watch_operation,
        "WatchFleet": coordinator.watch_fleet,
    }
    for name, method in handlers.items():
        unary = _without_deadline(method)
        implementations[name] = refusals.logged(name, unary) if name not in _OFTEN else unary
    for name, method in implementations.items():
        audited = _audited(coordinator, name, method) if name in AUDITED else method
        implementations[name] = _allowed(coordinator, denials, name, audited)
    for name, watch in watches.items():
        implementations[name] = _watch(watch)
    implementations["WatchFleet"] = _for_followers(implementations["WatchFleet"], denials)
    return implementations


def _for_followers(method: Streaming, denials: Denials) -> Streaming:
    """Restrict ``watch_id`` of WatchFleet to callers with a scope, since the coordinator waits for such watches."""
    needs = Method("WatchFleet with watch_id", FOLLOWS)

    def call(request: Any, remaining_s: float | None) -> AsyncIterator[Message]:
        identity = calling.get()
        refused = refusal(identity.principal, needs) if identity is not None and request.watch_id else None
        if identity is not None and refused is not None:
            denials.note(identity, needs, refused, identity.host)
            raise refused
        return method(request, remaining_s)

    return call


def _of_own_slot(
    method: Callable[[Any], Awaitable[Message]], slot: Callable[[Any], str]
) -> Callable[[Any], Awaitable[Message]]:
    """Restrict a method to the own slot of a stage with a certificate."""

    async def call(request: Any) -> Message:
        identity = caller()
        if identity is not None and identity.role is Role.STAGE and identity.name != slot(request):
            raise Reason.PEER_NOT_ALLOWED.error(f"{identity} may not act for slot {slot(request)!r}", field="slot")
        return await method(request)

    return call


def _audited(coordinator: Coordinator, name: str, method: Unary) -> Unary:
    """Record each change by a method in the audit."""

    async def call(request: Any, remaining_s: float | None) -> Message:
        answer = await method(request, remaining_s)
        if not (hasattr(request, "header") and request.header.validate_only):
            await coordinator.audit.record(_audit_record(name, request))
        return answer

    return call


def _audit_record(name: str, request: Any) -> coordinator_pb2.AuditRecord:
    slots = [*getattr(request, "slots", ()), *filter(None, [getattr(request, "slot", "")])]
    identity = calling.get()
    return coordinator_pb2.AuditRecord(
        caller=current_caller(),
        method=name,
        state=OPERATION_STATE_OK,
        operation_id=getattr(request, "operation_id", "") or getattr(request, "update_id", ""),
        model=getattr(request, "model", ""),
        targets=len(slots),
        slots=slots[:MOST_SLOTS],
        host="" if identity is None else identity.host,
    )


def _allowed(coordinator: Coordinator, denials: Denials, name: str, method: Unary) -> Unary:
    """Restrict a method to callers whose scopes cover the models and the adapter of the request.

    Refusals by scope and by quota are noted as denied calls.
    """
    needs = Method(name, COORDINATOR_RPCS[name])

    async def call(request: Message, remaining_s: float | None) -> Message:
        identity = calling.get()
        if identity is not None and identity.principal.limited:
            refused = refusal(identity.principal, needs, coordinator.subject(request))
            if refused is not None:
                denials.note(identity, needs, refused, identity.host)
                raise refused
        try:
            return await method(request, remaining_s)
        except QuotaExceeded as error:
            if identity is not None:
                denials.note(identity, needs, error, identity.host)
            raise

    return call


def _without_deadline(method: Callable[[Any], Awaitable[Message]]) -> Unary:
    async def call(request: Message, _remaining_s: float | None) -> Message:
        return await method(request)

    return call


def _watch(method: Callable[[Any], AsyncIterator[Message]]) -> Streaming:
    def call(request: Message, _remaining_s: float | None) -> AsyncIterator[Message]:
        return method(request)

    return call
