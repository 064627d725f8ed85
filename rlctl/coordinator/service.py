"""The coordinator: one method for each RPC, without gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import NoReturn

from google.protobuf.message import Message

from rlctl.command_stream.commander import Commander
from rlctl.contract.access import Subject
from rlctl.contract.durations import seconds
from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.contract.validation import check
from rlctl.coordinator.audit import KEPT_S, Audit
from rlctl.coordinator.fleet import disruptions, versions
from rlctl.coordinator.fleet.admitted_slots import AdmittedSlots
from rlctl.coordinator.fleet.model_state import model_put
from rlctl.coordinator.fleet.observer import Observer
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot, enable
from rlctl.coordinator.fleet.stage_links import ATTACH_S, SERVING_LEASE_S, Peers
from rlctl.coordinator.journal.records import parsed
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.fanout import Fanout
from rlctl.coordinator.operations.idempotency_keys import Keys
from rlctl.coordinator.operations.operations import RETAINED, Operations, page_token
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.pauses.continue_when_resident import Waking
from rlctl.coordinator.pauses.pause import Pausing
from rlctl.coordinator.pauses.pause_expiry import Lifting
from rlctl.coordinator.subjects import refuse_fence, subject_of
from rlctl.coordinator.transaction.planner import Planner
from rlctl.coordinator.transaction.process_groups import GroupBook
from rlctl.coordinator.transaction.transfer import Transfer
from rlctl.coordinator.updates.from_disk import FromDisk
from rlctl.coordinator.updates.implicit import Implicit
from rlctl.coordinator.updates.manager import Graces, Updates
from rlctl.coordinator.verbs.carrier import Carrier
from rlctl.coordinator.verbs.routes import Parts
from rlctl.ports import Clock, Dialer, Journal, Put
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1.control_pb2 import Attach, Attached, ControlRequest, ControlResponse
from rlctl.v1.fleet_pb2 import Fleet, FleetEvent, StageRegistration
from rlctl.v1.journal_pb2 import FleetRecord, ModelRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_RUNNING, Operation
from rlctl.v1.update_pb2 import (
    AbortWeightUpdateRequest,
    BeginWeightUpdateRequest,
    BeginWeightUpdateResponse,
    CommitBatchRequest,
    CommitBatchResponse,
    CommitWeightUpdateRequest,
    JoinWeightUpdateRequest,
    JoinWeightUpdateResponse,
    RenewLeaseRequest,
    RenewLeaseResponse,
    RetryWeightUpdateRequest,
)
from rlctl.version import CONTRACT_VERSION, __version__

log = logging.getLogger(__name__)

ASK_S = 5.0

STOP_S = 4.0
"""Time for running operations to end when the coordinator stops. With the time for answers (``GRACE_S``) this is less
than launchers wait. The deadline of an operation may be hours, for example of a pause with mode drain."""

TOO_HIGH = 1 << 62
"""An epoch that no fleet reaches. A coordinator does not exceed a stage's epoch of this size: stages
obey no epoch above twice this number, and the journal would keep the epoch forever."""

LASTS_S = 1.0
"""Age from which a link counts as lasting. The coordinator of an ended link dials again after 0.1 s."""

MOST_REFUSED = 100
"""Most refused slots that are logged."""


class Coordinator:
    """One fleet. Every public coroutine is an RPC, or carries out a verb of the table."""

    def __init__(
        self,
        journal: Journal,
        dialer: Dialer[ControlRequest, ControlResponse],
        clock: Clock,
        *,
        lease_s: float = SERVING_LEASE_S,
        heal_by_hand: Collection[str] = (),
        retained: int = RETAINED,
        audit_kept_s: float = KEPT_S,
        topology: Collection[str] | None = None,
        graces: Graces | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Make a coordinator without links.

        Args:
            lease_s: serving lease of a stage.
            heal_by_hand: models whose stages are healed only on request. Stages of other models are healed
                automatically.
            retained: number of ended operations that are kept.
            topology: admitted slots, besides slots on record and slots that an operator admits; None: every slot.
            graces: waits for trainers that may be dead.
            observer: receives events.
        """
        self._journal = journal
        self._dialer = dialer
        self._clock = clock
        self._raising = asyncio.Lock()
        self._refused: set[str] = set()
        """Refused slots and addresses, as logged."""
        self.roster = Roster(journal, clock, observer)
        self.admitted_slots = AdmittedSlots(journal, topology)
        self.audit = Audit(journal, clock, audit_kept_s)
        self.operations = Operations(journal, self.roster, clock, self.audit, retained)
        self.keys = Keys(journal, self.operations.new_id)
        self._peers = Peers(self.roster, dialer, clock, journal, self._reported, lease_s=lease_s)
        fanout = Fanout(self.roster, self._peers, clock)
        context = Context(self.roster, self._peers, fanout, self.operations, journal, clock)
        groups = GroupBook()
        planner = Planner(self.roster, groups, self.operations.new_id, clock.new_key)
        transfer = Transfer(context, groups, planner)
        self.updates = Updates(context, groups, planner, transfer, heal_by_hand=heal_by_hand, graces=graces or Graces())
        disk = FromDisk(context, self.updates, planner)
        self.implicit = Implicit(context, self.updates, planner, transfer)
        waking = Waking(context)
        pausing = Pausing(context, waking)
        self._carrier = Carrier(Parts(context, self.updates, self.implicit, disk, transfer, waking, pausing))
        self._lifting = Lifting(context, pausing, self.verb)

    async def start(self) -> None:
        """Load the journal, then connect to the stages."""
        await self.load()
        for slot in list(self.roster.slots.values()):
            if not slot.record.retired:
                self._peers.connect(slot)
        self.updates.start()
        self._lifting.start()
        log.info("epoch %d: %d slots on record", self.roster.epoch, len(self.roster.slots))

    async def load(self) -> None:
        """Load the journal, under a higher epoch than every coordinator before. Nothing is sent."""
        for key, body in self._journal.read("fleet"):
            record = parsed("fleet", key, body, FleetRecord)
            self.roster.epoch, self.roster.first_sequence = record.fleet_epoch, record.first_sequence
        await self._take_over(self.roster.epoch)
        self.roster.load()
        self.admitted_slots.load()
        self._peers.outlive_predecessor()
        self.audit.load()
        await self.operations.load()
        self.keys.load()

    async def _take_over(self, seen_epoch: int) -> None:
        """Raise the epoch above a seen epoch, durably. Links under the former epoch are closed and dialled again."""
        async with self._raising:
            if seen_epoch < self.roster.epoch:
                return
            record = FleetRecord(fleet_epoch=seen_epoch + 1, first_sequence=self.roster.first_sequence)
            await self._journal.write([Put("fleet", "", record.SerializeToString())])
            self.roster.epoch = seen_epoch + 1
            await self._peers.disconnect()

    async def end_of_reign(self) -> NoReturn:
        """Wait until a different coordinator owns the journal, then raise JOURNAL_FAILED. This coordinator then
        commands nothing.
        """
        await self._peers.succeeded.wait()
        raise self._peers.succeeded_error()

    async def stop(self) -> None:
        """Abort open updates, wait for running operations, close the links.

        Operations without a result then end UNKNOWN.
        """
        await self._lifting.stop()
        await self.updates.stop()
        await self.operations.stop(STOP_S)
        await self._peers.stop()
        await self.operations.stop(STOP_S)

    def subject(self, request: Message) -> Subject | None:
        return subject_of(request, self.roster, self.operations)

    # The table's verbs.

    async def verb(self, request: Message, remaining_s: float | None = None) -> Operation:
        """Carry out a verb of the table. ``remaining_s``: time until the caller's deadline."""
        check(request)
        refuse_fence(request)
        return await self._carrier.carry_out(request, remaining_s)

    # Weight updates.

    async def begin_weight_update(self, request: BeginWeightUpdateRequest) -> BeginWeightUpdateResponse:
        check(request)
        refuse_fence(request)
        timeout_s = seconds(request.header.timeout) if request.header.HasField("timeout") else None
        begins = self.implicit if request.implicit else self.updates
        return await begins.begin(request, timeout_s)

    async def join_weight_update(self, request: JoinWeightUpdateRequest) -> JoinWeightUpdateResponse:
        """Return the plan of an open update to a further source."""
        check(request)
        return self.updates.join(request)

    async def retry_weight_update(self, request: RetryWeightUpdateRequest) -> BeginWeightUpdateResponse:
        """Plan a further attempt of an open update."""
        check(request)
        return await self.updates.retry(request)

    async def commit_weight_update(self, request: CommitWeightUpdateRequest) -> Operation:
        check(request)
        if not request.update_id:
            return await self.implicit.answer(await self.implicit.commit(request))
        return await (await self.updates.commit(request)).answer()

    async def commit_batch(self, request: CommitBatchRequest) -> CommitBatchResponse:
        """Commit a batch of a rolling update in place."""
        check(request)
        follows = await self.updates.commit_batch(request)
        if isinstance(follows, Run):
            return CommitBatchResponse(header=self.roster.header(), ended=await follows.answer())
        return CommitBatchResponse(header=self.roster.header(), next=follows)

    async def abort_weight_update(self, request: AbortWeightUpdateRequest) -> Operation:
        check(request)
        cause = from_detail(request.error) if request.error.reason else None
        run = await self.updates.abort(request.update_id, request.fencing_token, request.reason, cause)
        return await run.answer()

    async def renew_lease(self, request: RenewLeaseRequest) -> RenewLeaseResponse:
        check(request)
        return self.updates.renew(request.update_id, request.fencing_token)

    # Operations.

    async def reserve_request_id(self, request: rpc.ReserveRequestIdRequest) -> rpc.ReserveRequestIdResponse:
        """Return the request id of an idempotency key."""
        check(request)
        request_id = await self.keys.reserve(request.key, request.body_sha256)
        return rpc.ReserveRequestIdResponse(header=self.roster.header(), request_id=request_id)

    async def get_operation(self, request: rpc.GetOperationRequest) -> Operation:
        run = self.operations.get(request.operation_id)
        answer = await run.answer(wait=False)
        run.write_timeline()
        if run.record.HasField("timeline"):
            answer.timeline.CopyFrom(run.record.timeline)
        return answer

    async def list_operations(self, request: rpc.ListOperationsRequest) -> rpc.ListOperationsResponse:
        """Return operations, newest first."""
        check(request)
        size = min(request.page_size or 50, 1000)
        runs = self.operations.newest_first(request.verb, request.state, request.page_token)
        page = runs[:size]
        return rpc.ListOperationsResponse(
            header=self.roster.header(),
            operations=[run.operation for run in page],
            next_page_token=page_token(page[-1]) if len(runs) > size else "",
        )

    async def list_audit_records(self, request: rpc.ListAuditRecordsRequest) -> rpc.ListAuditRecordsResponse:
        """Return audit records, newest first."""
        check(request)
        size = min(request.page_size or 50, 1000)
        page = list(itertools.islice(self.audit.newest_first(request), size + 1))
        return rpc.ListAuditRecordsResponse(
            header=self.roster.header(),
            records=[record for _, record in page[:size]],
            next_page_token=page[size - 1][0] if len(page) > size else "",
        )

    async def watch_operation(self, request: rpc.WatchOperationRequest) -> AsyncIterator[Operation]:
        async for operation in self.operations.get(request.operation_id).watch():
            yield operation

    async def cancel_operation(self, request: rpc.CancelOperationRequest) -> Operation:
        """Cancel commands of an operation that have not started, and abort the update of the operation, if any."""
        run = self.operations.get(request.operation_id)
        if run.operation.state == OPERATION_STATE_RUNNING:
            run.give_up()
            if run.operation.update_id == run.operation.operation_id:
                await self.updates.abort(run.operation.update_id, 0, "cancelled by CancelOperation")
        return await run.answer()

    # The fleet.

    async def register_stage(self, request: rpc.RegisterStageRequest) -> rpc.RegisterStageResponse:
        """Register a stage that joins or returns."""
        check(request)
        self._refuse_unadmitted(request.registration)
        slot = await self._register(request.registration)
        return rpc.RegisterStageResponse(
            header=self.roster.header(), incarnation=slot.record.incarnation, contract_version=CONTRACT_VERSION
        )

    async def _register(self, registration: StageRegistration) -> Slot:
        if abs(registration.contract_version - CONTRACT_VERSION) > 1:
            raise Reason.FIELD_INVALID.error(
                f"the stage speaks contract {registration.contract_version}, this coordinator {CONTRACT_VERSION}",
                field="registration.contract_version",
            )
        await self._refuse_second(registration)
        slot = await self.roster.register(registration)
        self._peers.connect(slot)
        return slot

    def _refuse_unadmitted(self, registration: StageRegistration) -> None:
        slot = self.roster.slots.get(registration.slot)
        if slot is not None and not slot.record.retired:
            return
        try:
            self.admitted_slots.refuse(registration.slot)
        except RlctlError as error:
            process = f"{registration.slot} at {registration.address}"
            if process not in self._refused and len(self._refused) < MOST_REFUSED:  # each stage retries once a second
                self._refused.add(process)
                log.warning("%s is refused: %s", process, error)
            raise

    async def _refuse_second(self, registration: StageRegistration) -> None:
        """Refuse a process in the slot of a living stage. Two processes would otherwise replace each other forever.

        A stage is replaced once the link has ended, or if the new process answers at the same address.
        """
        slot = self.roster.slots.get(registration.slot)
        if slot is None or slot.commander is None or slot.commander.lost or slot.record.retired:
            return
        existing = slot.record.registration
        if existing.boot_id == registration.boot_id:
            return
        if existing.address == registration.address:
            current = (await self._ask_who(registration.address)).registration
            if current.boot_id == registration.boot_id:
                return
        raise Reason.INCARNATION_FENCED.error(
            f"{slot.name} is filled by a living stage, at {existing.address}",
            field="registration.slot",
            next_step="Stop the other stage, or give this stage a slot of its own. It can register once the other "
            "stage has ended.",
        )

    async def adopt(self, address: str) -> Slot:
        """Register a stage server that does not register itself: inspect the server, then take it over.

        A former coordinator is fenced: the epoch is raised above the epoch of the stage.
        """
        attached = await self._ask_who(address)
        _refuse_epoch(attached, "")
        await self._take_over(attached.report.fleet_epoch)
        registration = attached.registration
        registration.address = address
        check(rpc.RegisterStageRequest(registration=registration))
        return await self._register(registration)

    async def _ask_who(self, address: str) -> Attached:
        """Inspect a stage server without a take-over."""
        commander = Commander(await self._dialer.dial(address), self._clock)
        receiving = asyncio.create_task(commander.run())
        try:
            async with asyncio.timeout(ASK_S):
                return await commander.attach(Attach(contract_version=CONTRACT_VERSION))
        except TimeoutError:
            raise Reason.UNREACHABLE.error(f"{address} did not answer an attach within {ASK_S:g} s") from None
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def deregister_stage(self, request: rpc.DeregisterStageRequest) -> rpc.DeregisterStageResponse:
        """Retire a slot."""
        slot = self.roster.slot(request.slot)
        if request.boot_id and request.boot_id != slot.record.registration.boot_id:
            raise Reason.INCARNATION_FENCED.error(f"{slot.name} is filled by another process now", field="boot_id")
        async with contextlib.AsyncExitStack() as planned:
            if not request.force:
                # Otherwise an update in planning could have the stage as a target.
                await planned.enter_async_context(self.roster.models[slot.model].opening)
                self.updates.refuse_target(slot)
            with disruptions.disrupting(self.roster, [slot], force=request.force or request.leaves):
                if not request.leaves:  # not the stage itself: the slot is given up
                    slot.engine_failure = None
                await self.roster.retire(slot)
            slot.gone = slot.gone or request.leaves
        if slot.commander is not None:
            await slot.commander.close()
        return rpc.DeregisterStageResponse(header=self.roster.header())

    async def get_fleet(self, request: rpc.GetFleetRequest) -> Fleet:
        fleet = self.roster.fleet(request.model)
        fleet.contract_version, fleet.rlctl_version = CONTRACT_VERSION, __version__
        return fleet

    async def list_versions(self, request: rpc.ListVersionsRequest) -> rpc.ListVersionsResponse:
        check(request)
        record = self.roster.model(request.model).record
        return rpc.ListVersionsResponse(header=self.roster.header(), versions=versions.history(record))

    async def watch_fleet(self, request: rpc.WatchFleetRequest) -> AsyncIterator[FleetEvent]:
        check(request)
        async for event in self.roster.watch(request.model, request.watch_id):
            yield event

    async def confirm_fleet(self, request: rpc.ConfirmFleetRequest) -> rpc.ConfirmFleetResponse:
        check(request)
        self.roster.followers.confirm(request.watch_id, request.revision)
        return rpc.ConfirmFleetResponse(header=self.roster.header())

    async def set_stage_enabled(self, request: rpc.SetStageEnabledRequest) -> Fleet:
        """Set the operator's mark on stages."""
        check(request)
        slots = [self.roster.slot(name, f"slots[{index}]") for index, name in enumerate(request.slots)]
        now = self._clock.wall()
        with contextlib.ExitStack() as changing:
            if not request.enabled:
                changing.enter_context(disruptions.disrupting(self.roster, slots, force=request.force))
            if not request.header.validate_only:
                await self.roster.change(slots, lambda record: enable(record, request.enabled, request.reason, now))
        if not request.enabled and not request.header.validate_only:
            await self.roster.announce({slot.model for slot in slots})
        return self.roster.fleet()

    async def report_engine_failure(self, request: rpc.ReportEngineFailureRequest) -> rpc.ReportEngineFailureResponse:
        """Record a launcher's report of the cause of an empty slot."""
        check(request)
        slot = self.roster.slot(request.slot)
        if not request.header.validate_only:
            slot.engine_failure = request.failure
            self.roster.changed()
        return rpc.ReportEngineFailureResponse(header=self.roster.header())

    async def admit_slots(self, request: rpc.AdmitSlotsRequest) -> rpc.AdmitSlotsResponse:
        check(request)
        if not request.header.validate_only:
            await self.admitted_slots.change(request.slots, request.dismissed)
            self._refused.clear()
        return rpc.AdmitSlotsResponse(
            header=self.roster.header(), every=self.admitted_slots.open, slots=self.admitted_slots.slots
        )

    async def take_over_stages(self, request: rpc.TakeOverStagesRequest) -> Fleet:
        """Take over stages that obey the epoch of a different coordinator, by order of an operator."""
        check(request)
        named = [self.roster.slot(name, f"slots[{index}]") for index, name in enumerate(request.slots)]
        unlinked = await self._without_lasting_link(named)
        attached = {slot.name: await self._ask_who(slot.record.registration.address) for slot in unlinked}
        for index, name in enumerate(request.slots):
            if name in attached:
                _refuse_epoch(attached[name], f"slots[{index}]")
        epoch = max((stage.report.fleet_epoch for stage in attached.values()), default=0)
        if unlinked and not request.header.validate_only:
            await self._take_over(epoch)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ATTACH_S):
                    await self.roster.until(lambda: all(slot.linked for slot in unlinked))
        return self.roster.fleet()

    async def _without_lasting_link(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the stages without a link, and the stages whose link is replaced within ``LASTS_S``.

        Two coordinators at the same epoch end each other's links.
        """
        links = {slot: slot.commander for slot in slots if slot.linked}

        def replaced() -> list[Slot]:
            return [slot for slot in slots if not slot.linked or slot.commander is not links.get(slot)]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LASTS_S):
                await self.roster.until(lambda: len(replaced()) == len(slots))
        return replaced()

    async def set_healing(self, request: rpc.SetHealingRequest) -> Fleet:
        """Switch automatic heals of a model on or off."""
        check(request)
        if not request.header.validate_only:
            self.updates.set_healing(request.model, by_hand=request.by_hand)
        return self.roster.fleet()

    async def set_min_healthy(self, request: rpc.SetMinHealthyRequest) -> Fleet:
        """Set the limit of the voluntary disruptions of a model."""
        check(request)
        model = self.roster.model(request.model)
        if not request.header.validate_only:
            async with self.roster.publishing:
                record = ModelRecord()
                record.CopyFrom(model.record)
                record.min_healthy.CopyFrom(request.min_healthy)
                await self._journal.write([model_put(record)])
                model.record.min_healthy.CopyFrom(request.min_healthy)  # the record's groups may have changed meanwhile
            self.roster.changed()
        return self.roster.fleet()

    async def heal_stage(self, request: rpc.HealStageRequest) -> Operation:
        check(request)
        timeout_s = seconds(request.header.timeout) if request.header.HasField("timeout") else None
        replayed = self.operations.known(request.header.request_id, request) is not None
        return await (await self.updates.heal(request, timeout_s)).answer(replayed=replayed)

    async def _reported(self, slot: Slot) -> None:
        """Take in a report of a stage: publish a first version or a first digest, and clear orphans."""
        async with self.roster.publishing:
            model = self.roster.models[slot.model]
            record = versions.first_version(model, slot, self._clock.wall())
            record = record or versions.first_digest(self.roster, slot)
            if record is not None:
                await self._journal.write([model_put(record)])
                versions.publish(model, record)
                self.roster.changed()
        self.updates.look_after(slot)


def _refuse_epoch(attached: Attached, field: str) -> None:
    """Raise EPOCH_FENCED for a stage whose epoch this coordinator must not exceed."""
    epoch = attached.report.fleet_epoch
    if epoch >= TOO_HIGH:
        raise Reason.EPOCH_FENCED.error(
            f"{attached.registration.slot} obeys epoch {epoch}, which no fleet reaches",
            field=field,
            next_step="Restart its engine: it then obeys no epoch.",
        )
