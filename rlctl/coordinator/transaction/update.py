"""A weight update from the first step to the last: prepare, write, commit or abort.

The order is a promise: pause → prepare → write → commit at every target → flush → verify → publish → admit → resume.
No stage serves the version before the publish. After the publish the update always finishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import acknowledged, blame
from rlctl.contract.verbs import of_request
from rlctl.coordinator.fleet import disruptions
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.collective_fanout import has_left
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.pauses.continue_when_resident import Waking
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.owner import Owner
from rlctl.coordinator.transaction.planner import pause_mode
from rlctl.coordinator.transaction.request_targets import RequestTargets
from rlctl.coordinator.transaction.timeline import UpdateTimeline
from rlctl.coordinator.transaction.verification_levels import Expected, Level
from rlctl.ports import Put
from rlctl.v1 import common_pb2
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_RETRACT,
    PAUSE_MODE_UNSPECIFIED,
    STAGE_STATE_ASLEEP,
    Target,
)
from rlctl.v1.fleet_pb2 import Pause
from rlctl.v1.journal_pb2 import (
    UPDATE_PHASE_OPEN,
    UPDATE_PHASE_PUBLISHED,
    PauseRecord,
    UpdateRecord,
)
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse
from rlctl.v1.verbs_pb2 import (
    APPLY_MODE_STAGED,
    APPLY_MODE_UNSPECIFIED,
    UPDATE_KIND_FULL,
    UPDATE_KIND_PARTIAL,
    UPDATE_KIND_UNSPECIFIED,
    AbortUpdateRequest,
    Adapter,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    DestroyWeightsUpdateGroupRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
    SealUpdateRequest,
)

_GENERATING = (common_pb2.STAGE_STATE_PAUSED, common_pb2.STAGE_STATE_READY)

_ENDING = (CommitUpdateRequest, AbortUpdateRequest)

CLEANUP_S = 30.0
"""Time for steps that must be tried after the update's own deadline: abort, resume."""


class Update:
    """A weight update, or the heal of a stage: targets, steps and state.

    Attributes:
        run: the operation that receives the results.
        owner: lease and decision. A heal has no owner.
        frozen: the target set, as frozen by the begin.
        targets: targets that no attempt has lost. In a rolling in-place update: targets of the present batch.
        waiting: targets of later batches.
        done: targets that have confirmed.
        resume: names of targets that generate again afterwards.
        paused_at: time of the first pause (of the present batch), on the clock's ``now``.
        adapter: the adapter to update; None: the update is of the weights.
        reference: a stage outside the targets that has the weights that the targets should have, or None.
        received: answers of targets to the writes of the present attempt.
        broken: a write of the present attempt has failed.
        missed: names of targets that did not receive all tensors.
        unprepared: first failed answer of each target that could not be paused or prepared.
        abandoned: groups of earlier updates that targets may still be in.
        planning: lock for the planning of a further attempt or of the next batch.
        batch_done: set once the present batch is committed, or the update has ended.
        ended: the update is no longer open.
        requests: the targets of requests, and the turns of writes.
    """

    run: Run
    owner: Owner

    def __init__(
        self,
        context: Context,
        record: UpdateRecord,
        model: ModelState,
        targets: Sequence[Slot],
        deadline: float,
        adapter: Adapter | None = None,
    ) -> None:
        self.record = record
        self.adapter = adapter
        self.model = model
        self.frozen = tuple(targets)
        self.targets = list(targets)
        self.waiting: list[Slot] = []
        self.done: list[Slot] = []
        self.deadline = deadline
        self.checkpoint = ""
        self.reference: Slot | None = None
        self.received: list[StageResult] = []
        self.broken = False
        self.abandoned: list[str] = []
        self.planning = asyncio.Lock()
        self.batch_done = asyncio.Event()
        self.ended = False
        self._context = context
        self._roster = context.roster
        self._fanout = context.fanout
        self._clock = context.clock
        self._opened_at = context.clock.now()
        self._steps = 0
        self.timeline = UpdateTimeline(context.clock)
        self.resume: set[str] = set()
        self.paused_at: float | None = None
        self._commanded = False
        self._preparing: asyncio.Task[None] | None = None
        self._aborted = False
        self.unprepared: list[StageResult] = []
        self.missed: set[str] = set()
        self._digesting: set[str] = set()
        self.requests = RequestTargets(record.plan)
        if self.rolls_in_place:
            self.waiting, self.targets = self.targets, []
            self.next_batch()

    def accept(self, run: Run) -> None:
        """Add results and phases to an operation from now on."""
        self.run = run
        self.timeline.belong_to(run)

    @property
    def update_id(self) -> str:
        return self.record.plan.update_id

    @property
    def elapsed_s(self) -> float:
        """Return the time since the begin. In a staged update: since the pause, as the transfer delays no request."""
        since = self.paused_at if self.staged and self.paused_at is not None else self._opened_at
        return self._clock.now() - since

    @property
    def full(self) -> bool:
        """Whether the update writes every parameter."""
        return self.record.request.kind in (UPDATE_KIND_UNSPECIFIED, UPDATE_KIND_FULL)

    @property
    def staged(self) -> bool:
        """Whether the update fills shadow copies while engines generate."""
        return self.record.request.apply == APPLY_MODE_STAGED and self.adapter is None

    @property
    def aside(self) -> bool:
        """Whether engines generate until the commit: in a staged update, and in an update of an adapter."""
        return self.staged or self.adapter is not None

    @property
    def rolls_in_place(self) -> bool:
        """Whether the targets are written batch by batch, with a pass of the sources for each batch."""
        return bool(self.record.request.rollout.max_unavailable) and not self.staged

    @property
    def published(self) -> bool:
        """Whether the version is published. The update then always finishes."""
        return self.record.phase == UPDATE_PHASE_PUBLISHED

    @property
    def remaining(self) -> int:
        """Return the number of targets, in all batches, that have confirmed or still may."""
        return len({*self.targets, *self.waiting, *self.done})

    @property
    def written(self) -> bool:
        """Whether the present attempt has begun to prepare its targets."""
        return self._preparing is not None

    def reached_by(self, request: Message) -> list[Slot]:
        """Return the present targets reached by the request's transport and groups."""
        return self.requests.reached(request, self.targets)

    @property
    def transports(self) -> dict[str, common_pb2.Transport.ValueType]:
        """Return the transport of each present target, by slot."""
        return self.requests.transports(self.targets)

    @property
    def quorum(self) -> int:
        """Return the number of targets that must confirm."""
        return self.record.request.options.quorum or len(self.frozen)

    # Write.

    async def leave_groups(self, names: Sequence[str]) -> None:
        """Let the targets leave groups. This ends waits inside the groups.

        A group that may still have a rank stays on record. The next update leaves the group.
        """
        for name in names:
            results = await self.step(DestroyWeightsUpdateGroupRequest(group_name=name), self.frozen, cleanup=True)
            if name in self.model.record.groups and all(has_left(result) for result in results):
                self.model.record.groups.remove(name)

    async def ready(self) -> None:
        """Pause and prepare the targets, once for all writes. Raises if a target refuses."""
        self._refuse_ended()
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._prepare())
        try:
            await asyncio.shield(self._preparing)
        except asyncio.CancelledError:
            if self._preparing.cancelled():
                self._refuse_ended()
            raise
        self._refuse_ended()

    def _refuse_ended(self) -> None:
        if self._aborted:
            raise Reason.CANCELLED.error(f"update {self.update_id} has ended")

    def start_over(self, lost: Sequence[Slot]) -> Callable[[], None]:
        """Start a further attempt without the lost targets. The other targets are prepared again before a write.

        Returns a function that undoes the start and all later changes of the plan.
        """
        plan = BeginWeightUpdateResponse()
        plan.CopyFrom(self.record.plan)
        before = self.targets, self.waiting, self._preparing, self.paused_at
        self.timeline.turn()

        def undo() -> None:
            self.record.plan.CopyFrom(plan)
            self.targets, self.waiting, self._preparing, self.paused_at = before

        self.targets = [slot for slot in self.targets if slot not in lost]
        self._preparing = None
        if not self.targets and self.waiting:
            self.next_batch()
        return undo

    def next_batch(self) -> None:
        """Select the next batch of a rolling in-place update. The groups of the batch are planned afterwards."""
        self.timeline.turn()
        size = disruptions.batch_size(self._roster, self.model, self.record.request.rollout.max_unavailable)
        self.targets, self.waiting = self.waiting[:size], self.waiting[size:]
        self._preparing, self.paused_at = None, None
        batch = self.record.plan.batch
        batch.number += 1
        batch.last = not self.waiting
        batch.published = self.published
        del batch.slots[:]
        batch.slots.extend(slot.name for slot in self.targets)

    def open_batch(self) -> None:
        """Open the present batch, once planned, for writes and a decision."""
        self.received, self.broken = [], False
        self.owner.next_batch()
        done, self.batch_done = self.batch_done, asyncio.Event()
        done.set()

    def fail_write(self) -> None:
        """Record a failed write of the present attempt. The lease of a silent owner then ends earlier."""
        self.broken = True
        self.owner.shorten(self._clock.now())

    @property
    def is_written_to(self) -> bool:
        """Whether a write of an implicit update is running. Such a client cannot renew a lease: the write shows that
        the client is alive.
        """
        return self.record.request.implicit and self.requests.is_written_to

    def leave_out(self) -> None:
        """Drop the targets that did not receive all tensors. Raises QUORUM_NOT_MET."""
        failed = [result for result in self.received if not acknowledged(result, update=True)]
        for result in failed:
            self.run.add(result)
        self.missed |= {result.slot for result in failed}
        self.targets = [slot for slot in self.targets if slot.name not in self.missed]
        if failed and self.remaining < self.quorum:
            raise self.short_of_quorum(self.remaining, str(blame(failed[0])))

    async def _prepare(self) -> None:
        self._commanded = True
        if self.aside:
            self._all_applied(_flat(await self.in_order(*self._prepares())))
            return
        async with self._roster.leaving(self.targets):
            await self._prepare_in_place()

    async def _prepare_in_place(self) -> None:
        running = self._generating(self.targets)
        if self._pause_mode != PAUSE_MODE_UNSPECIFIED:
            # Each stage runs the pause before the prepare. A prepare after a refused pause does no harm: the prepare
            # writes nothing, and the update is aborted.
            self._all_applied(_flat(await self.in_order(self._pause(running), *self._prepares())))
            return
        self._all_applied(_flat(await self.in_order(*self._prepares())))
        # No request was active. From here on the pause, not the open update, keeps requests away, also if the update
        # fails.
        self._all_applied(await self._pause(running))

    async def pause(self, slots: Sequence[Slot]) -> list[StageResult]:
        """Pause the stages that generate and record them for the continue. Returns results of the pauses."""
        async with self._roster.leaving(slots):
            return await self._pause(self._generating(slots))

    def _generating(self, slots: Sequence[Slot]) -> list[Slot]:
        awake = [slot for slot in slots if slot.state != STAGE_STATE_ASLEEP]
        running = [slot for slot in awake if slot.report is not None and not slot.report.paused]
        # In a further attempt this update has paused most stages already (``held``).
        self.resume |= {slot.name for slot in awake if slot in running or slot.paused_by_update}
        return running

    async def _pause(self, slots: Sequence[Slot]) -> list[StageResult]:
        if self.staged or self.paused_at is None:
            self.paused_at = self._clock.now()
        return await self.step(PauseGenerationRequest(mode=self._pause_mode or PAUSE_MODE_RETRACT), slots)

    @property
    def _pause_mode(self) -> common_pb2.PauseMode.ValueType:
        return pause_mode(self.record.request)

    def _prepares(self) -> list[Coroutine[Any, Any, list[StageResult]]]:
        """Return the prepare steps: one for the targets that digest received tensors, one for the other targets."""
        options, transports = self.record.request.options, self.transports
        partial = self.record.request.kind == UPDATE_KIND_PARTIAL
        by_digesting: dict[bool, list[Slot]] = {False: [], True: []}
        for slot in self.targets:
            digests = self.adapter is None and verification_levels.digests_what_comes(
                options, slot, transports[slot.name], self._together, partial=partial
            )
            by_digesting[digests].append(slot)
        self._digesting = {slot.name for slot in by_digesting[True]}
        return [
            self.step(self._prepare_request(digest_received=digests), slots)
            for digests, slots in by_digesting.items()
            if slots
        ]

    def _prepare_request(self, *, digest_received: bool) -> PrepareUpdateRequest:
        begin = self.record.request
        return PrepareUpdateRequest(
            digest_received=digest_received,
            digest_key=self.record.plan.digest_key if digest_received else b"",
            adapter=self.adapter,
            adapter_config=begin.adapter_config if begin.HasField("adapter_config") else None,
            version=self.record.plan.version,
            kind=self.record.request.kind,
            apply=begin.apply if self.adapter is None else APPLY_MODE_UNSPECIFIED,
            pause=begin.options.pause if self.adapter is not None else PAUSE_MODE_UNSPECIFIED,
            abort_all_requests=self.record.request.options.abort_all_requests and not self.staged,
            num_sources=max(1, self.record.request.num_sources),
            selector=self.record.request.options.selector,
        )

    async def step(
        self, request: Message, slots: Sequence[Slot], *, cleanup: bool = False, limit_s: float | None = None
    ) -> list[StageResult]:
        """Send a verb of the update to some targets. Raises CANCELLED once the update has ended.

        ``cleanup``: try the verb also after the end or deadline of the update. ``limit_s``: time limit, if shorter
        than the verb's.
        """
        if not cleanup:
            self._refuse_ended()
        verb = of_request(request)
        self._steps += 1
        step = f"{self._steps}-{verb.name}"
        request.header.fence.update_id = self.update_id  # type: ignore[attr-defined]
        now = self._clock.now()
        limit_s = verb.deadline_s if limit_s is None else min(limit_s, verb.deadline_s)
        try:
            with self.timeline.step(verb.name, slots, lambda: self.transports) as on_result:
                return await self._fanout.run(
                    request,
                    slots,
                    operation_id=self.update_id,
                    step=step,
                    deadline=min(now + CLEANUP_S if cleanup else self.deadline, now + limit_s),
                    on_result=on_result,
                    aside=self.aside and verb.in_update and not isinstance(request, _ENDING),
                    lenient=self._aborted,
                )
        except asyncio.CancelledError:
            self._fanout.cancel(slots, self.update_id, step)
            raise

    async def in_order(self, *steps: Coroutine[Any, Any, list[StageResult]]) -> list[list[StageResult]]:
        """Run several steps without a round trip in between.

        Every stage gets the commands over one stream, in this order, and runs one at a time. Each step must be harmless
        after a failure of an earlier step.
        """
        return await asyncio.gather(*steps)

    async def go_on(self, slots: Sequence[Slot]) -> list[StageResult]:
        """Continue generation at stages that the update has paused. A pause by name keeps its stages paused."""
        paused_by_name = [slot for slot in slots if slot.pause is not None]
        handed_over = await self._hand_over(paused_by_name) if paused_by_name else []
        resumable = [slot for slot in slots if slot.pause is None]
        return [*await self.step(ContinueGenerationRequest(), resumable, cleanup=True), *handed_over]

    async def hand_over_pause(self, slots: Sequence[Slot]) -> list[StageResult]:
        """Turn the update's pause into a recorded pause by name of the update's owner. No other update lifts such a
        pause. Returns results of the paused stages.
        """
        await Waking(self._context).forget(slots)
        if any(slot.pause is None for slot in slots):
            await self._roster.pauses.begin(self._pause_record(slots))
            self._roster.pauses.confirm(self.update_id)
        return await self._hand_over(slots)

    def _pause_record(self, slots: Sequence[Slot]) -> PauseRecord:
        """Return the pause by name after the update. While an update rolls, the pause covers the batches until now,
        otherwise the whole target.
        """
        target = Target()
        target.CopyFrom(self.record.request.header.target)
        target.model = self.model.record.name
        if self.waiting:
            target.slots[:] = sorted({slot.name for slot in (*self.done, *slots)})
        return PauseRecord(
            target=target,
            pause=Pause(
                operation_id=self.update_id,
                mode=self.record.request.options.pause or PAUSE_MODE_RETRACT,
                since=self._clock.wall(),
                by=self.model.update_owner,
            ),
        )

    async def _hand_over(self, slots: Sequence[Slot]) -> list[StageResult]:
        mode = self.record.request.options.pause or PAUSE_MODE_RETRACT
        paused = [slot for slot in slots if slot.paused_by_update]
        self._steps += 1
        return await self._fanout.run(
            PauseGenerationRequest(mode=mode),
            paused,
            operation_id=self.update_id,
            step=f"{self._steps}-hand-over",
            deadline=self._clock.now() + CLEANUP_S,
        )

    def _all_applied(self, results: Sequence[StageResult]) -> None:
        first: dict[str, StageResult] = {}
        for result in results:
            if result.outcome != OUTCOME_APPLIED:
                # A stage that loses a rank in the pause refuses the prepare. The refusal must not hide the loss.
                first.setdefault(result.slot, result)
        self.unprepared = list(first.values())
        if self.unprepared:
            raise blame(self.unprepared[0])

    def levels(self, expected: Expected) -> dict[str, Level]:
        """Return the verification level of each target, by slot.

        Raises FIELD_REQUIRED if a level needs a digest that is missing, VERIFICATION_UNREACHABLE if a target can reach
        no level.
        """
        return verification_levels.levels(
            self.record.request.options,
            self.targets,
            self.transports,
            expected,
            self._together,
            digesting=self._digesting,
            adapter=self.adapter is not None,
        )

    @property
    def _together(self) -> list[Slot]:
        """Return the stages to compare with each other: the present targets, and targets that serve the version."""
        return [*self.targets, *(self.done if self.published and self.model.record.model_digest else [])]

    def short_of_quorum(self, count: int, cause: str) -> RlctlError:
        """Return the error for too few remaining or confirmed targets."""
        return Reason.QUORUM_NOT_MET.error(
            f"{count} of {len(self.frozen)} targets remain, {self.quorum} must confirm; {cause}"
        )

    async def seal_adapter(self, slots: Sequence[Slot]) -> list[StageResult]:
        """Complete the staged adapter at the targets. Requests with the adapter stop until the commit or the abort."""
        self.paused_at = self._clock.now() if self.paused_at is None else self.paused_at
        return await self.step(SealUpdateRequest(), slots)

    # Abort.

    async def abort(self, error: RlctlError) -> None:
        """End without a version. Targets past the first byte become DIRTY, other targets keep their weights."""
        self._aborted = True
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        if self._commanded:
            await self._abort(error)

    async def _abort(self, error: RlctlError) -> None:
        results = await self.step(AbortUpdateRequest(reason=error.message), self.frozen, cleanup=True)
        restored = [
            slot
            for slot, result in zip(self.frozen, results, strict=True)
            if result.outcome == OUTCOME_APPLIED and result.state in _GENERATING and slot.name in self.resume
        ]
        for result in results:
            self.file(result, error)
        # A READY stage may still have a queued pause of this update that waits for requests to drain.
        for result in await self.go_on(restored):
            ended = next(r for r in self.run.operation.stage_results if r.slot == result.slot)
            ended.state = result.state
            if result.outcome != OUTCOME_APPLIED:
                ended.error.message += f"; the stage did not continue generation: {result.error.message}"

    def file(self, result: StageResult, error: RlctlError) -> None:
        """Add the result of an abort at a target: DIRTY, REJECTED (weights unchanged) or UNKNOWN (no answer)."""
        # Failures of earlier steps do not matter once the shadow copy is dropped.
        dropped = self.aside and result.outcome == OUTCOME_APPLIED
        if result.outcome == OUTCOME_APPLIED:
            result.outcome = common_pb2.OUTCOME_REJECTED
            if result.state == common_pb2.STAGE_STATE_DIRTY:
                result.outcome = OUTCOME_DIRTY
            elif result.state == common_pb2.STAGE_STATE_FAILED and self.adapter is None:
                result.outcome = OUTCOME_UNKNOWN  # FAILED hides whether the weights are a mixture, also after a swap
            result.error.CopyFrom(error.detail())
        elif result.outcome != OUTCOME_DIRTY:
            # The abort did not reach the target, which may be partly written.
            result.outcome = OUTCOME_UNKNOWN
        for earlier in self.run.operation.stage_results:
            if earlier.slot == result.slot and earlier.outcome not in (OUTCOME_APPLIED, 0):
                result.error.CopyFrom(earlier.error)
                result.outcome = result.outcome if dropped else max(result.outcome, earlier.outcome)
                if earlier.rank_results:
                    del result.rank_results[:]
                    result.rank_results.extend(earlier.rank_results)
        # APPLIED at a rank means the abort or an earlier step, not the update.
        for rank in result.rank_results:
            if rank.outcome == OUTCOME_APPLIED:
                rank.outcome = result.outcome
                rank.error.CopyFrom(result.error)
        self.run.add(result)

    def put(self) -> Put:
        """Return the journal entry of the update. The end of the operation deletes the entry."""
        return Put("update", self.update_id, self.record.SerializeToString())

    async def check_journal(self) -> None:
        """Write the record again, before a step that makes targets unusable without a publish. Raises JOURNAL_FAILED.

        An update that fills shadow copies or reads from disk may have written to the journal long before. A heal has no
        record.
        """
        if self.record.phase == UPDATE_PHASE_OPEN:
            await self._context.journal.write([self.put()])

    async def record_published(self, *changes: Put) -> None:
        """Journal the update as published, in one transaction with ``changes``. Raises JOURNAL_FAILED."""
        published = UpdateRecord()
        published.CopyFrom(self.record)
        published.phase = UPDATE_PHASE_PUBLISHED
        await self._context.journal.write([*changes, Put("update", self.update_id, published.SerializeToString())])
        self.record.phase = UPDATE_PHASE_PUBLISHED


def _flat(steps: Sequence[Sequence[StageResult]]) -> list[StageResult]:
    return [result for results in steps for result in results]
