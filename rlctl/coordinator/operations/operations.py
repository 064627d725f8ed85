"""The operations of the fleet: accepted once, journaled before the first command, retained with their outcomes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.adapter_identity import adapter_of
from rlctl.contract.errors import Reason, RlctlError, typed, without_frames
from rlctl.contract.quotas import excess_operations
from rlctl.contract.scopes import calling, current_caller, current_traceparent
from rlctl.contract.verbs import VERBS
from rlctl.coordinator.audit import Audit
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot, names
from rlctl.coordinator.journal.records import parsed
from rlctl.coordinator.operations.run import Run
from rlctl.ports import Clock, Delete, Journal, Put
from rlctl.runtime.logs import bound
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_SKIPPED, OUTCOME_UNKNOWN
from rlctl.v1.journal_pb2 import UPDATE_PHASE_PUBLISHED, OperationRecord, UpdateRecord
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_CANCELLED,
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_RUNNING,
    OPERATION_STATE_UNKNOWN,
    ExcludedStage,
    Operation,
    OperationState,
)

log = logging.getLogger(__name__)

RETAINED = 10_000
"""Number of ended operations to retain, in memory and in the journal."""

RETAINED_BYTES = 64 << 20
"""Limit of the journaled bytes of all ended operations. Memory usage is six times as high. An operation of a thousand
stages of eight ranks has 300 kB.
"""


async def _begin_nothing(run: Run) -> None:
    """End an operation CANCELLED whose acceptance was cancelled."""
    run.refuse_given_up()


class Operations:
    """All operations, by id."""

    def __init__(
        self,
        journal: Journal,
        roster: Roster,
        clock: Clock,
        audit: Audit,
        retained: int = RETAINED,
        retained_bytes: int = RETAINED_BYTES,
    ) -> None:
        self._journal = journal
        self._audit = audit
        self._retained = retained
        self._retained_bytes = retained_bytes
        self._roster = roster
        self._clock = clock
        self._runs: dict[str, Run] = {}
        self._running: dict[str, Run] = {}
        self._ended: dict[str, int] = {}
        """Bytes of the ended operations, by id, in the order of the ends."""
        self._ended_bytes = 0
        self._unrecorded: set[str] = set()
        """Ended operations whose end is not in the journal yet."""
        self._holders: dict[str, str] = {}
        self._joined: dict[str, str] = {}
        """Operation of each joined call, by the call's request id."""
        self._last_place = 0
        """Place of the latest acceptance."""
        self._forgotten = ""
        """Newest id of the dropped operations and joined calls. Ids are UUIDv7 and sort by time."""

    async def load(self) -> None:
        """Load the journal. Operations that ran when the previous coordinator ended become UNKNOWN.

        Records of open updates are deleted.
        """
        for _, body in self._journal.read("forgotten"):
            self._forgotten = body.decode()
        updates = self._journal.read("update")
        phases = {key: parsed("update", key, body, UpdateRecord).phase for key, body in updates}
        changes: list[Put | Delete] = [Delete("update", key) for key in phases]
        for key, body in self._journal.read("operation"):
            record = parsed("operation", key, body, OperationRecord)
            if record.operation.state == OPERATION_STATE_RUNNING:
                record.operation.state = OPERATION_STATE_UNKNOWN
                published = phases.get(key) == UPDATE_PHASE_PUBLISHED
                note = "; its version had been published" if published else ""
                record.operation.error.CopyFrom(
                    Reason.LINK_LOST.error(f"the coordinator was restarted while the operation ran{note}").detail()
                )
                ended = max(self._clock.wall(), record.operation.create_time, key=Timestamp.ToNanoseconds)
                record.operation.done_time.CopyFrom(ended)
                changes.append(Put("operation", key, record.SerializeToString()))
                changes += self._audit.ended(record.operation)
            run = self._runs[key] = Run(record)
            self._last_place = max(self._last_place, run.place)
            self._ended[key] = len(body)
            self._joined |= {call.request_id: key for call in record.joined}
        self._ended = {key: self._ended[key] for key in sorted(self._ended, key=self._done_at)}
        self._ended_bytes = sum(self._ended.values())
        if changes:
            await self._journal.write(changes)

    def known(self, request_id: str, request: Message) -> Run | None:
        """Return the operation that this request started or joined before, or None.

        Raises REQUEST_ID_REUSED if the earlier body differs. Raises REQUEST_ID_EXPIRED for an id without an operation
        that is not newer than the newest dropped id: its operation may have been dropped.
        """
        run = self._runs.get(self._joined.get(request_id, request_id))
        if run is None and request_id and request_id <= self._forgotten:
            raise Reason.REQUEST_ID_EXPIRED.error(
                f"request_id {request_id} is not newer than the newest operation that was dropped from the record; it "
                f"was made at {_made_at(request_id)}, and the coordinator's clock says "
                f"{self._clock.wall().ToDatetime():%F %T} UTC",
                field="header.request_id",
            )
        if run is not None and body_hash(request, request_id) not in _hashes(run.record, request_id):
            raise Reason.REQUEST_ID_REUSED.error(
                f"request_id {request_id} was used for another {run.operation.verb}", field="header.request_id"
            )
        return run

    async def start(
        self,
        request: Message,
        *,
        verb: str,
        targets: Sequence[Slot],
        excluded: Sequence[ExcludedStage],
        work: Callable[[Run], Awaitable[None]],
        exclusive: bool,
        model: str = "",
        update_id: str = "",
        step: bool = False,
        changes: Sequence[Put] = (),
        changes_at_end: Sequence[Put | Delete] = (),
    ) -> Run:
        """Accept an operation: journal the record with ``changes`` in one transaction, then run ``work`` in a task.

        A disconnect of the caller does not cancel the task. ``work`` adds the results. An error of ``work`` ends the
        operation: UNKNOWN if a result is UNKNOWN or the error is a defect, CANCELLED after :meth:`give_up`, else
        FAILED. If this call is cancelled, ``work`` does not run, and the operation ends CANCELLED.

        Args:
            exclusive: refuse the operation (OPERATION_CONFLICT) while an exclusive operation runs on a target.
            update_id: update of the operation. Under an id that is not ``update_id``, the operation is a step.
            step: the operation is a step of an open update, without an ``update_id``.
            changes_at_end: changes to journal with the end of the operation.

        Raises REQUEST_ID_REUSED if an operation was accepted under the id since the caller's check, QUOTA_EXCEEDED, and
        the error of the journal.
        """
        operation_id = request.header.request_id or self.new_id()  # type: ignore[attr-defined]
        if self.known(operation_id, request) is not None:
            raise Reason.REQUEST_ID_REUSED.error(
                f"request_id {operation_id} was used for another {self._runs[operation_id].operation.verb}",
                field="header.request_id",
            )
        step = step or update_id not in ("", operation_id)
        if not step:
            self.refuse_excess(verb)
        if exclusive:
            self._hold(operation_id, targets)
        operation = Operation(
            header=self._roster.header(),
            operation_id=operation_id,
            verb=verb,
            state=OPERATION_STATE_RUNNING,
            targets=names(targets),
            excluded=excluded,
            model=model,
            update_id=update_id,
            create_time=self._clock.wall(),
            adapter=adapter_of(request),
            caller=current_caller(),
        )
        run = Run(OperationRecord(operation=operation, request_sha256=body_hash(request, operation_id)))
        run.step = step
        # Ids do not tell the order: clients make them by their own clocks. Nor does a wall clock that was set back.
        run.place = self._last_place = max(run.place, self._last_place + 1)
        run.begun_at = self._clock.now()
        run.traceparent = current_traceparent()
        run.changes_at_end.extend(changes_at_end)
        self._runs[operation_id] = self._running[operation_id] = run
        try:
            await self._journal.write([*changes, _put(run.record)])
        except asyncio.CancelledError:
            # The journal ends a write that has begun, so the record may be durable.
            run.give_up()
            run.task = asyncio.create_task(self._work(run, _begin_nothing))
            raise
        except Exception as error:
            del self._runs[operation_id], self._running[operation_id]
            self._release(operation_id)
            # A repeat may wait for the operation already. It gets the same refusal, and may be sent again.
            run.operation.state = OPERATION_STATE_FAILED
            run.refused = typed(error)
            run.operation.error.CopyFrom(run.refused.detail())
            await run.end()
            raise
        run.task = asyncio.create_task(self._work(run, work))
        return run

    def new_id(self) -> str:
        """Return a new id, newer than all dropped ids even if the wall clock has been set back."""
        uuid = self._clock.new_id()
        if uuid > self._forgotten:
            return uuid
        milliseconds = f"{int(self._forgotten.replace('-', '')[:12], 16) + 1:012x}"
        return f"{milliseconds[:8]}-{milliseconds[8:]}{uuid[13:]}"

    def hypothetical(self, verb: str, targets: Sequence[Slot], excluded: Sequence[ExcludedStage] = ()) -> Run:
        """Return the ended, unrecorded operation of a request that was only validated."""
        operation = Operation(
            header=self._roster.header(),
            operation_id=self.new_id(),
            verb=verb,
            state=OPERATION_STATE_OK,
            targets=names(targets),
            excluded=excluded,
            validate_only=True,
        )
        return Run(OperationRecord(operation=operation))

    async def _work(self, run: Run, work: Callable[[Run], Awaitable[None]]) -> None:
        operation = run.operation
        try:
            with bound(**self._named(run)):
                await work(run)
        except RlctlError as error:
            unknown = any(result.outcome == OUTCOME_UNKNOWN for result in operation.stage_results)
            cancelled = run.given_up and error.reason is Reason.CANCELLED
            ended = OPERATION_STATE_CANCELLED if cancelled else OPERATION_STATE_FAILED
            operation.state = OPERATION_STATE_UNKNOWN if unknown else ended
            operation.error.CopyFrom(without_frames(error).detail())
        except Exception as error:  # a defect must end the operation, not leave it running for ever
            log.exception("%s %s failed", operation.verb, operation.operation_id)
            operation.state = OPERATION_STATE_UNKNOWN
            operation.error.CopyFrom(typed(without_frames(error)).detail())
        finally:
            self._release(operation.operation_id)
            if operation.state == OPERATION_STATE_RUNNING:
                run.conclude()
            operation.done_time.CopyFrom(run.time_at(self._clock.now()))
            operation.header.CopyFrom(self._roster.header())
            await self._end(run)

    async def _end(self, run: Run) -> None:
        run.write_timeline()
        run.timelines = []
        put = _put(run.record)
        size = len(put.body)
        try:
            await self._drop(self._expired(), put, *run.changes_at_end, *self._audit.ended(run.operation))
            run.changes_at_end.clear()
        except RlctlError as error:
            self._unrecorded.add(run.operation.operation_id)
            log.warning(
                "%s %s has ended, and the journal could not record the end: %s",
                run.operation.verb,
                run.operation.operation_id,
                error,
            )
        finally:
            self._running.pop(run.operation.operation_id, None)
            self._ended[run.operation.operation_id] = size
            self._ended_bytes += size
            run.ended_at = self._clock.now()
            with bound(**self._named(run)):
                log.log(*_line(run))
            self._roster.observer.operation_ended(run.record, run.ended_at - run.begun_at, run.traceparent)
            await run.end()

    def _named(self, run: Run) -> dict[str, str | int]:
        """Return the fields of an operation's log lines."""
        operation = run.operation
        return {
            "operation": operation.operation_id,
            "verb": operation.verb,
            "update": operation.update_id,
            "epoch": self._roster.epoch,
            "principal": operation.caller.principal,
        }

    async def drop_expired(self) -> int:
        """Drop operations above the limits of retention. Returns the number. Raises JOURNAL_FAILED."""
        expired = self._expired()
        if expired:
            await self._drop(expired)
        return len(expired)

    async def _drop(self, expired: Sequence[str], *changes: Put | Delete) -> None:
        """Delete operations from the journal, together with other changes, then from memory."""
        ids = [*expired, *(call.request_id for key in expired for call in self._runs[key].record.joined)]
        # A caller with a fast clock makes an id of the future. As the newest dropped id, it would expire all new ids.
        fresh_id = self.new_id()
        forgotten = max((past_id for past_id in ids if past_id <= fresh_id), default="")
        drops: list[Put | Delete] = [Delete("operation", key) for key in expired]
        drops += [change for key in expired for change in self._runs[key].changes_at_end]
        if forgotten > self._forgotten:
            drops.append(Put("forgotten", "", forgotten.encode()))
        await self._journal.write([*changes, *drops])
        self._forget(expired)
        self._forgotten = max(self._forgotten, forgotten)

    def _forget(self, expired: Sequence[str]) -> None:
        """Drop operations from memory. The end of another operation may have dropped some of them meanwhile."""
        self._unrecorded.difference_update(expired)
        for key in expired:
            run = self._runs.pop(key, None)
            self._ended_bytes -= self._ended.pop(key, 0)
            for call in run.record.joined if run is not None else ():
                self._joined.pop(call.request_id, None)

    async def record_ended(self) -> None:
        """Record the ends that the journal could not record before. Raises JOURNAL_FAILED if it still cannot."""
        late = sorted(self._unrecorded)
        if late:
            runs = [self._runs[key] for key in late]
            ended = [change for run in runs for change in (*run.changes_at_end, *self._audit.ended(run.operation))]
            await self._journal.write([*(_put(run.record) for run in runs), *ended])
            for run in runs:
                run.changes_at_end.clear()
            self._unrecorded.difference_update(late)

    async def join(self, run: Run, request: Message) -> None:
        """Record that an operation is the answer to a further call and to repeats of this call."""
        request_id: str = request.header.request_id  # type: ignore[attr-defined]
        if request_id in ("", run.operation.operation_id) or request_id in self._joined:
            return
        call = run.record.joined.add(request_id=request_id, request_sha256=body_hash(request, request_id))
        self._joined[request_id] = run.operation.operation_id
        try:
            await self._journal.write([_put(run.record)])
        except BaseException:
            # The call gets no answer. After a restart a repeat may get a different operation.
            del self._joined[request_id]
            run.record.joined.remove(call)
            raise

    def get(self, operation_id: str) -> Run:
        """Return the operation of an operation id or a joined request id. Raises OPERATION_NOT_FOUND."""
        run = self._runs.get(self._joined.get(operation_id, operation_id))
        if run is None:
            raise Reason.OPERATION_NOT_FOUND.error(f"no operation {operation_id!r} is on record", field="operation_id")
        return run

    def newest_first(self, verb: str, state: OperationState.ValueType, before: str = "") -> list[Run]:
        """Return operations in the order of acceptance, newest first.

        ``before``: a :func:`page_token`. The page begins after the operation of the token.
        Raises FIELD_INVALID for an invalid token.
        """
        start = _parsed_token(before) if before else None
        runs = (run for run in self._runs.values() if verb in ("", run.operation.verb))
        matching = (run for run in runs if state in (0, run.operation.state))
        return sorted((run for run in matching if start is None or _accepted(run) < start), key=_accepted, reverse=True)

    def running(self) -> list[Operation]:
        """Return the operations that have not ended."""
        return [run.operation for run in self._running.values()]

    async def stop(self, within_s: float) -> None:
        """Wait for running operations, at most ``within_s``."""
        running = [run.task for run in self._runs.values() if run.task and not run.task.done()]
        if running:
            await asyncio.wait(running, timeout=within_s)

    def refuse_excess(self, verb: str, ends: Collection[str] = ()) -> None:
        """Raise QUOTA_EXCEEDED if an operation of this verb exceeds a limit of the caller.

        Steps of updates do not count.

        ``ends``: operations under way that do not count, because the new operation ends them.
        """
        identity = calling.get()
        if identity is None:  # the coordinator itself
            return
        relieves = _relieves(verb)
        under_way = sum(
            run.operation.caller.principal == identity.principal.name
            and _relieves(run.operation.verb) == relieves
            and not run.step
            for key, run in self._running.items()
            if key not in ends
        )
        refusal = excess_operations(identity.principal, under_way, relieves=relieves)
        if refusal is not None:
            raise refusal

    def refuse_held(self, targets: Sequence[Slot]) -> None:
        """Raise OPERATION_CONFLICT if an exclusive operation is running on one of the stages."""
        for slot in targets:
            holder = self._holders.get(slot.name)
            if holder is not None:
                verb = self._runs[holder].operation.verb
                raise Reason.OPERATION_CONFLICT.error(
                    f"{verb} {holder} is running on {slot.name}", metadata={"holder": holder, "slot": slot.name}
                )

    def holds(self, slot: Slot) -> bool:
        """Whether an exclusive operation is running on a stage."""
        return slot.name in self._holders

    def _hold(self, operation_id: str, targets: Sequence[Slot]) -> None:
        self.refuse_held(targets)
        for slot in targets:
            self._holders[slot.name] = operation_id

    def _release(self, operation_id: str) -> None:
        for name in [name for name, holder in self._holders.items() if holder == operation_id]:
            del self._holders[name]

    def _expired(self) -> list[str]:
        surplus, excess = len(self._ended) - self._retained, self._ended_bytes - self._retained_bytes
        expired = []
        for key, size in self._ended.items():
            if surplus <= 0 and excess <= 0:
                break
            expired.append(key)
            surplus, excess = surplus - 1, excess - size
        return expired

    def _done_at(self, operation_id: str) -> int:
        return self._runs[operation_id].operation.done_time.ToNanoseconds()


def _relieves(verb: str) -> bool:
    """Return :attr:`Verb.relieves`; False for an operation that is no verb of the table."""
    return verb in VERBS and VERBS[verb].relieves


def page_token(run: Run) -> str:
    """Return the position of an operation in the list of operations. The token outlives the record."""
    place, operation_id = _accepted(run)
    return f"{place}/{operation_id}"


def _accepted(run: Run) -> tuple[int, str]:
    return run.place, run.operation.operation_id


def _parsed_token(token: str) -> tuple[int, str]:
    nanoseconds, _, operation_id = token.partition("/")
    if not (nanoseconds.isascii() and nanoseconds.isdecimal() and len(nanoseconds) <= 20 and operation_id):
        raise Reason.FIELD_INVALID.error(
            f"{token!r} is not a page token; pass next_page_token of the previous answer", field="page_token"
        )
    return int(nanoseconds), operation_id


def _made_at(request_id: str) -> str:
    """Return the time in a UUIDv7, by the clock of its maker."""
    milliseconds = int(request_id.replace("-", "")[:12], 16)
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%F %T} UTC"


def body_hash(request: Message, request_id: str = "") -> bytes:
    """Return the SHA-256 of a request's content under an id.

    Left out are fields that may differ between repeats, and between calls that join one operation: timeout, epoch, and
    the engine of the call.
    """
    body = type(request)()
    body.CopyFrom(request)
    header = body.header  # type: ignore[attr-defined]
    header.request_id = request_id
    for cleared in ("timeout", "for_slot", "unkeyed"):
        header.ClearField(cleared)
    if header.HasField("fence"):
        header.fence.ClearField("fleet_epoch")
    name = request.DESCRIPTOR.full_name.encode()
    return hashlib.sha256(name + b"\0" + body.SerializeToString(deterministic=True)).digest()


def _line(run: Run) -> tuple[int, str]:
    """Return the log line of an ended operation: level, outcome, time, number of targets and error."""
    operation = run.operation
    state = OperationState.Name(operation.state).removeprefix("OPERATION_STATE_")
    confirmed = sum(result.outcome in (OUTCOME_APPLIED, OUTCOME_SKIPPED) for result in operation.stage_results)
    version = f", {operation.weight_version.label}#{operation.weight_version.sequence}"
    words = [
        f"{operation.verb} {operation.operation_id}" + f" of {operation.model}" * bool(operation.model),
        f": {state} in {run.ended_at - run.begun_at:.2f} s, {confirmed} of {len(operation.targets)} targets",
        version * bool(operation.weight_version.sequence),
    ]
    if operation.state == OPERATION_STATE_OK:
        return logging.INFO, "".join(words)
    error = operation.error
    return logging.WARNING, "".join(words) + f": {error.reason}: {' '.join(error.message.split())}"


def _hashes(record: OperationRecord, request_id: str) -> list[bytes]:
    """Return the hashes of the bodies under an id that started or joined an operation."""
    if request_id == record.operation.operation_id:
        return [record.request_sha256]
    return [call.request_sha256 for call in record.joined if call.request_id == request_id]


def _put(record: OperationRecord) -> Put:
    return Put("operation", record.operation.operation_id, record.SerializeToString())
