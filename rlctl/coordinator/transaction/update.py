"""One weight update from its first step to its last: prepare, write, commit or abort.

The order is the promise: pause → prepare → write → commit at every target → flush → verify → publish → admit → resume.
Nothing of the version is served before it is published; after that the update is finished, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import acknowledged, blame
from rlctl.contract.verbs import of_request
from rlctl.coordinator.fleet.roster import ModelState, Slot
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.operations import Run
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.owner import Owner
from rlctl.coordinator.transaction.planner import pause_mode
from rlctl.coordinator.transaction.process_groups import ALONE, BACKENDS
from rlctl.coordinator.transaction.timeline import UpdateTimeline
from rlctl.coordinator.transaction.verification_levels import Expected, Level
from rlctl.coordinator.verbs.continue_when_resident import Waking
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
    InitWeightsUpdateGroupRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
    SealUpdateRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
)

_FROM_MEMORY = (common_pb2.TRANSPORT_SHARED_MEMORY, common_pb2.TRANSPORT_CUDA_IPC)

_GENERATING = (common_pb2.STAGE_STATE_PAUSED, common_pb2.STAGE_STATE_READY)

_ENDING = (CommitUpdateRequest, AbortUpdateRequest)

CLEANUP_S = 30.0
"""Time for steps that must be tried although the update's own time is up: abort, resume."""


class Update:
    """One weight update, or the heal of one stage: its targets, its steps, and its state.

    Attributes:
        run: the operation of the update, which its results are added to.
        owner: its lease and decision; not of a heal.
        frozen: the targets as they were when the update began.
        targets: the targets that no attempt has lost; of an update that rolls in place, those of the present batch.
        waiting: targets of the batches after the present one.
        done: targets that have confirmed.
        resume: names of targets that generate again afterwards.
        paused_at: time of the first pause (of the present batch), on the clock's ``now``.
        adapter: the adapter that is updated; None: the weights are.
        reference: a stage that is no target and holds the weights that the targets should hold, or None.
        received: answers of targets to the writes of the present attempt.
        broken: a write of the present attempt has failed.
        missed: names of targets that did not take in all that was sent to them.
        unprepared: answers of targets that could not be paused or prepared.
        abandoned: groups of earlier updates that targets may still be in.
        planning: held while another attempt or the next batch is planned.
        batch_done: set once the present batch is committed, or the update has ended.
        ended: the update is not open any more.
        timeline: its phases.
        writing: locks by transport, or by stage where each stage is fed alone. A write holds its lock, so that several
            sources write one after the other. No target has two transports: different transports do not wait.
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
        self._told = False
        self._preparing: asyncio.Task[None] | None = None
        self._aborted = False
        self.unprepared: list[StageResult] = []
        self.missed: set[str] = set()
        self._digesting: set[str] = set()
        self._alone = {target.slot for target in record.plan.targets if target.transport in ALONE}
        turns = (*_FROM_MEMORY, *(transport for transport in BACKENDS if transport not in ALONE), *self._alone)
        self.writing: dict[object, asyncio.Lock] = {turn: asyncio.Lock() for turn in turns}
        if self.rolls_in_place:
            self.waiting, self.targets = self.targets, []
            self.next_batch()

    def accept(self, run: Run) -> None:
        """Add results and phases to an operation from now on."""
        self.run = run
        self.timeline.belong_to(run)

    @property
    def update_id(self) -> str:
        """Which update."""
        return self.record.plan.update_id

    @property
    def elapsed_s(self) -> float:
        """Time that it has taken; of a staged update, that of its pause: the transfer kept no request waiting."""
        since = self.paused_at if self.staged and self.paused_at is not None else self._opened_at
        return self._clock.now() - since

    @property
    def full(self) -> bool:
        """Whether it writes every parameter."""
        return self.record.request.kind in (UPDATE_KIND_UNSPECIFIED, UPDATE_KIND_FULL)

    @property
    def staged(self) -> bool:
        """Whether it lands in shadow copies while generation goes on."""
        return self.record.request.apply == APPLY_MODE_STAGED and self.adapter is None

    @property
    def aside(self) -> bool:
        """Whether generation goes on until the commit: a staged update, and an adapter's."""
        return self.staged or self.adapter is not None

    @property
    def rolls_in_place(self) -> bool:
        """Whether its targets are written batch by batch, each in a pass of the sources of its own."""
        return bool(self.record.request.rollout.max_unavailable) and not self.staged

    @property
    def published(self) -> bool:
        """Whether its version is, so that it can only be finished."""
        return self.record.phase == UPDATE_PHASE_PUBLISHED

    @property
    def left(self) -> int:
        """Number of targets that have confirmed or may still, of all batches."""
        return len({*self.targets, *self.waiting, *self.done})

    @property
    def written(self) -> bool:
        """Whether its targets were prepared in the present attempt."""
        return self._preparing is not None

    def reached_by(self, request: Message) -> list[Slot]:
        """The targets that a request is for: of what forms groups and writes, those that are fed that way."""
        transports = self._transports_of(request)
        planned, members = self.transports, self._members_of(request)
        return [
            slot
            for slot in self.targets
            if (not transports or planned[slot.name] in transports) and (not members or slot.name in members)
        ]

    def turns_of(self, request: Message) -> list[asyncio.Lock]:
        """What is to be held while targets take in what a request announces, in one order for all."""
        transports = self._transports_of(request)
        alone = set() if ALONE.isdisjoint(transports) else self._alone & (self._members_of(request) or self._alone)
        return [self.writing[turn] for turn in (*(each for each in transports if each not in ALONE), *sorted(alone))]

    def _members_of(self, request: Message) -> set[str]:
        """The stages in the plan's groups that a request is for, or the reader of its segments; none: it names none."""
        if isinstance(request, UpdateWeightsFromTensorRequest):
            return {segment.reader.slot for segment in request.segments} - {""}
        names = _group_names(request)
        return {m.slot for group in self.record.plan.groups if group.group_name in names for m in group.members}

    def _transports_of(self, request: Message) -> Sequence[common_pb2.Transport.ValueType]:
        """The transports of the targets that a request is for; none: it has nothing to do with any. Groups that are not
        the plan's, but of a client's own, are those of every target that is fed over groups.
        """
        match request:
            case UpdateWeightsFromTensorRequest():
                return _FROM_MEMORY
            case InitWeightsUpdateGroupRequest() | UpdateWeightsFromDistributedRequest():
                names = _group_names(request)
            case _:
                return ()
        backends = {group.backend for group in self.record.plan.groups if group.group_name in names}
        return [transport for transport, backend in BACKENDS.items() if backend in backends or not backends]

    @property
    def transports(self) -> dict[str, common_pb2.Transport.ValueType]:
        """How tensors reach each target, by slot; one that is healed counts as fed over a group."""
        planned = {target.slot: target.transport for target in self.record.plan.targets}
        return {slot.name: planned.get(slot.name, common_pb2.TRANSPORT_TORCH_GLOO) for slot in self.targets}

    @property
    def quorum(self) -> int:
        """Number of targets that must confirm."""
        return self.record.request.options.quorum or len(self.frozen)

    # Write.

    @contextlib.asynccontextmanager
    async def taken_in(self) -> AsyncIterator[None]:
        """Once all that was sent until now has been taken in or has failed; inside, nothing more is."""
        async with contextlib.AsyncExitStack() as writing:
            for lock in self.writing.values():
                await writing.enter_async_context(lock)
            yield

    async def leave_groups(self, names: Sequence[str]) -> None:
        """Let the targets forget groups, breaking what waits in them.

        One that a rank may still be in stays on record, to be left by the next update.
        """
        for name in names:
            results = await self.step(DestroyWeightsUpdateGroupRequest(group_name=name), self.frozen, cleanup=True)
            if name in self.model.record.groups and all(has_left(result) for result in results):
                self.model.record.groups.remove(name)

    async def ready(self) -> None:
        """Pause and prepare the targets, once, however many writes ask for it. Raises when one refused."""
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
        """Another attempt, without the targets that are lost: the others are prepared anew before they are written.
        Returns what undoes that, and everything that has happened to the plan since.
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
        """Take the next batch of an update that rolls in place. The batch is planned afterwards."""
        self.timeline.turn()
        size = self.record.request.rollout.max_unavailable
        self.targets, self.waiting = self.waiting[:size], self.waiting[size:]
        self._preparing, self.paused_at = None, None
        batch = self.record.plan.batch
        batch.number += 1
        batch.last = not self.waiting
        batch.published = self.published
        del batch.slots[:]
        batch.slots.extend(slot.name for slot in self.targets)

    def open_batch(self) -> None:
        """Open the present batch, which is planned now, for writes and for its decision."""
        self.received, self.broken = [], False
        self.owner.next_batch()
        done, self.batch_done = self.batch_done, asyncio.Event()
        done.set()

    def fail_write(self) -> None:
        """Note that a write of the present attempt has failed."""
        self.broken = True
        self.owner.shorten(self._clock.now())

    @property
    def is_written_to(self) -> bool:
        """Whether a client that cannot renew its lease is alive: one of its writes is under way."""
        return self.record.request.implicit and any(lock.locked() for lock in self.writing.values())

    def leave_out(self) -> None:
        """Drop the targets that did not take in all that was sent to them. Raises QUORUM_NOT_MET."""
        failed = [result for result in self.received if not acknowledged(result, update=True)]
        for result in failed:
            self.run.add(result)
        self.missed |= {result.slot for result in failed}
        self.targets = [slot for slot in self.targets if slot.name not in self.missed]
        if failed and self.left < self.quorum:
            raise self.short_of_quorum(self.left, str(blame(failed[0])))

    async def _prepare(self) -> None:
        self._told = True
        if self.aside:
            self._all_applied(_flat(await self.in_order(*self._prepares())))
            return
        async with self._roster.leaving(self.targets):
            await self._prepare_in_place()

    async def _prepare_in_place(self) -> None:
        running = self._generating(self.targets)
        if self._pause_mode != PAUSE_MODE_UNSPECIFIED:
            # Each stage carries them out in this order. Where the pause is refused nothing is lost by the other one: it
            # writes nothing, and is aborted.
            self._all_applied(_flat(await self.in_order(self._pause(running), *self._prepares())))
            return
        self._all_applied(_flat(await self.in_order(*self._prepares())))
        # Nothing was active: from here on the pause, not the open update, keeps it so, also if the update fails.
        self._all_applied(await self._pause(running))

    async def pause(self, slots: Sequence[Slot]) -> list[StageResult]:
        """Stop generation where it goes on, and remember that it is to go on again; the results of those."""
        async with self._roster.leaving(slots):
            return await self._pause(self._generating(slots))

    def _generating(self, slots: Sequence[Slot]) -> list[Slot]:
        awake = [slot for slot in slots if slot.state != STAGE_STATE_ASLEEP]
        running = [slot for slot in awake if slot.report is not None and not slot.report.paused]
        # In a further attempt most are paused already, and those that were paused by us are held.
        self.resume |= {slot.name for slot in awake if slot in running or slot.held}
        return running

    async def _pause(self, slots: Sequence[Slot]) -> list[StageResult]:
        if self.staged or self.paused_at is None:
            self.paused_at = self._clock.now()
        return await self.step(PauseGenerationRequest(mode=self._pause_mode or PAUSE_MODE_RETRACT), slots)

    @property
    def _pause_mode(self) -> common_pb2.PauseMode.ValueType:
        return pause_mode(self.record.request)

    def _prepares(self) -> list[Coroutine[Any, Any, list[StageResult]]]:
        """The steps that prepare the targets: those that digest what comes are told apart from the others."""
        options, transports = self.record.request.options, self.transports
        partial = self.record.request.kind == UPDATE_KIND_PARTIAL
        apart: dict[bool, list[Slot]] = {False: [], True: []}
        for slot in self.targets:
            digests = self.adapter is None and verification_levels.digests_what_comes(
                options, slot, transports[slot.name], self._together, partial=partial
            )
            apart[digests].append(slot)
        self._digesting = {slot.name for slot in apart[True]}
        return [
            self.step(self._prepare_request(digest_received=digests), slots)
            for digests, slots in apart.items()
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
        """One verb of the update to some of its targets. ``cleanup``: it must be tried although the update has ended or
        its time is up. ``limit_s``: longest time, where it is less than the verb's. Raises CANCELLED once the update
        has ended.
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
        """Several steps without a round trip in between: every stage gets their commands over one stream, in this
        order, and carries out one at a time. Each must be harmless where one before it has failed.
        """
        return await asyncio.gather(*steps)

    async def go_on(self, slots: Sequence[Slot]) -> list[StageResult]:
        """Let stages generate again that the update has paused; under a pause by name they stay paused by that."""
        under = [slot for slot in slots if slot.pause is not None]
        handed_over = await self._hand_over(under) if under else []
        going = [slot for slot in slots if slot.pause is None]
        return [*await self.step(ContinueGenerationRequest(), going, cleanup=True), *handed_over]

    async def hand_over_pause(self, slots: Sequence[Slot]) -> list[StageResult]:
        """From here on the pause is its owner's, as if asked for by name, and kept as such: no other update lifts it.
        The results of those that are paused.
        """
        await Waking(self._context).forget(slots)
        if any(slot.pause is None for slot in slots):
            await self._roster.pauses.begin(self._pause_record(slots))
            self._roster.pauses.confirm(self.update_id)
        return await self._hand_over(slots)

    def _pause_record(self, slots: Sequence[Slot]) -> PauseRecord:
        """The pause that the update leaves: of its whole target, or while it rolls of the batches until now."""
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
        paused = [slot for slot in slots if slot.held]
        self._steps += 1
        return await self._fanout.run(
            PauseGenerationRequest(mode=mode),
            paused,
            operation_id=self.update_id,
            step=f"{self._steps}-hand-over",
            deadline=self._clock.now() + CLEANUP_S,
        )

    def _all_applied(self, results: Sequence[StageResult]) -> None:
        self.unprepared = [result for result in results if result.outcome != OUTCOME_APPLIED]
        if self.unprepared:
            raise blame(self.unprepared[0])

    def levels(self, expected: Expected) -> dict[str, Level]:
        """At which level each target is verified. Raises FIELD_REQUIRED when that needs a digest that is not given,
        VERIFICATION_UNREACHABLE when nothing is left that a target could be verified by.
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
        """The stages that can be compared with each other: those that are written, and those that serve the version."""
        return [*self.targets, *(self.done if self.published and self.model.record.model_digest else [])]

    def short_of_quorum(self, count: int, cause: str) -> RlctlError:
        """Too few targets are left, or confirmed."""
        return Reason.QUORUM_NOT_MET.error(
            f"{count} of {len(self.frozen)} targets are left, {self.quorum} must confirm; {cause}"
        )

    async def seal_adapter(self, slots: Sequence[Slot]) -> list[StageResult]:
        """Complete what the targets have staged. Requests with the adapter stop until the commit or the abort."""
        self.paused_at = self._clock.now() if self.paused_at is None else self.paused_at
        return await self.step(SealUpdateRequest(), slots)

    # Abort.

    async def abort(self, error: RlctlError) -> None:
        """End without a version: targets past their first byte are DIRTY, the others are as they were."""
        self._aborted = True
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
        if self._told:
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
        # One that is READY may still have a pause of ours before it, waiting for requests to drain.
        for result in await self.go_on(restored):
            if result.outcome == OUTCOME_APPLIED:
                next(r for r in self.run.operation.stage_results if r.slot == result.slot).state = result.state

    def file(self, result: StageResult, error: RlctlError) -> None:
        """What the abort left at a target: DIRTY, or as it was (REJECTED); UNKNOWN when it did not answer."""
        # Once a shadow copy is known to be dropped, what became of a step before that no longer matters.
        dropped = self.aside and result.outcome == OUTCOME_APPLIED
        if result.outcome == OUTCOME_APPLIED:
            dirty = result.state == common_pb2.STAGE_STATE_DIRTY
            result.outcome = OUTCOME_DIRTY if dirty else common_pb2.OUTCOME_REJECTED
            result.error.CopyFrom(error.detail())
        elif result.outcome != OUTCOME_DIRTY:
            # It could not be told, and may have been written into.
            result.outcome = OUTCOME_UNKNOWN
        for earlier in self.run.operation.stage_results:
            if earlier.slot == result.slot and earlier.outcome not in (OUTCOME_APPLIED, 0):
                result.error.CopyFrom(earlier.error)
                result.outcome = result.outcome if dropped else max(result.outcome, earlier.outcome)
                if earlier.rank_results:
                    del result.rank_results[:]
                    result.rank_results.extend(earlier.rank_results)
        # A rank's APPLIED is that of the abort or of a step before it, not of the update.
        for rank in result.rank_results:
            if rank.outcome == OUTCOME_APPLIED:
                rank.outcome = result.outcome
                rank.error.CopyFrom(result.error)
        self.run.add(result)

    def put(self) -> Put:
        """The journal entry of the update. The end of its operation deletes the entry."""
        return Put("update", self.update_id, self.record.SerializeToString())

    async def record_published(self, *changes: Put) -> None:
        """Write the update as published to the journal, in one transaction with ``changes``. Raises JOURNAL_FAILED."""
        published = UpdateRecord()
        published.CopyFrom(self.record)
        published.phase = UPDATE_PHASE_PUBLISHED
        await self._context.journal.write([*changes, Put("update", self.update_id, published.SerializeToString())])
        self.record.phase = UPDATE_PHASE_PUBLISHED


def _flat(steps: Sequence[Sequence[StageResult]]) -> list[StageResult]:
    return [result for results in steps for result in results]


def _group_names(request: Message) -> set[str]:
    match request:
        case InitWeightsUpdateGroupRequest():
            return {request.group_name}
        case UpdateWeightsFromDistributedRequest():
            return {bucket.group_name or request.group_name for bucket in request.buckets}
    return set()


def has_left(result: StageResult) -> bool:
    """Whether no rank of a stage is in a group that it was told to leave."""
    gone = Reason.GROUP_NOT_FOUND.name
    ranks = result.rank_results
    return bool(ranks) and all(rank.outcome == OUTCOME_APPLIED or rank.error.reason == gone for rank in ranks)
