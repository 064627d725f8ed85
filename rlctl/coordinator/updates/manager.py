"""The open weight updates: begin, lease, writes, and the end by a commit, an abort or the clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from rlctl.contract.adapter_identity import scale_of
from rlctl.contract.durations import duration, seconds
from rlctl.contract.errors import Reason, RlctlError, typed
from rlctl.contract.verbs import of_request
from rlctl.coordinator.fleet import versions
from rlctl.coordinator.fleet.model_state import model_put
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.healing.first_weights import FirstWeights
from rlctl.coordinator.healing.healer import GRACE_S, MAKE_WAY_S, Healer
from rlctl.coordinator.healing.orphans import Orphans
from rlctl.coordinator.operations.call_coalescing import Joining
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction import adapters
from rlctl.coordinator.transaction.adapters import CommitAdapter
from rlctl.coordinator.transaction.commit import Commit
from rlctl.coordinator.transaction.owner import Owner
from rlctl.coordinator.transaction.planner import Planner, in_progress
from rlctl.coordinator.transaction.process_groups import GroupBook
from rlctl.coordinator.transaction.rolling import Rolling
from rlctl.coordinator.transaction.transfer import Transfer, Write
from rlctl.coordinator.transaction.update import Update
from rlctl.coordinator.transaction.verification_levels import NOTHING
from rlctl.ports import Delete
from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_EXPECTED, Target
from rlctl.v1.coordinator_pb2 import HealStageRequest
from rlctl.v1.journal_pb2 import UPDATE_PHASE_OPEN, UpdateRecord
from rlctl.v1.results_pb2 import ExcludedStage
from rlctl.v1.update_pb2 import (
    BeginWeightUpdateRequest,
    BeginWeightUpdateResponse,
    CommitBatchRequest,
    CommitWeightUpdateRequest,
    JoinWeightUpdateRequest,
    JoinWeightUpdateResponse,
    RenewLeaseResponse,
    RetryWeightUpdateRequest,
)
from rlctl.v1.verbs_pb2 import (
    Adapter,
    UnloadAdapterRequest,
)

Content = Callable[[Update], Awaitable[None]]
"""Sends the weights of an update to the targets in a single call, and decides for the version."""

UPDATE_S = 600.0

TRAINERS_UPDATE = "WeightUpdate"
"""Recorded verb of a trainer's update, which has several calls."""

OWNER_S = 5.0
"""Default of :attr:`Graces.owner_s`."""

STOPPED_S = 1.0
"""A coordinator that notices the end of a lease this much too late was itself stopped. Renewals of the owner may then
be unread.
"""

LOOK_S = 10.0
"""Interval of the look at every stage. A heal source may have appeared, or an owner may be gone. Records that the
journal has refused are written again, too.
"""


@dataclass(frozen=True)
class Graces:
    """Seconds to wait for a trainer that may be dead.

    Attributes:
        owner_s: for a renewal by the owner of an update after a failed write, if the lease is longer.
        heal_s: for the next update, before a DIRTY or quarantined stage is healed.
    """

    owner_s: float = OWNER_S
    heal_s: float = GRACE_S


class Updates:
    """At most one open update per model."""

    def __init__(
        self,
        context: Context,
        groups: GroupBook,
        planner: Planner,
        transfer: Transfer,
        *,
        heal_by_hand: Collection[str],
        graces: Graces,
    ) -> None:
        """``heal_by_hand``: models whose stages are healed only on request."""
        self._owner_grace_s = graces.owner_s
        self._context = context
        self._roster = context.roster
        self._operations = context.operations
        self._clock = context.clock
        self._groups = groups
        self._planner = planner
        self._transfer = transfer
        self._rolling = Rolling(context, groups, planner)
        self._healer = Healer(context, by_hand=heal_by_hand, grace_s=graces.heal_s)
        self._first_weights = FirstWeights(context, self._healer.look)
        self._orphans = Orphans(context, self.is_open)
        self.joining = Joining(context.operations, context.clock)
        self._open: dict[str, Update] = {}
        self._looking: asyncio.Task[None] | None = None

    # Calls of trainers.

    async def begin(self, request: BeginWeightUpdateRequest, timeout_s: float | None) -> BeginWeightUpdateResponse:
        """Open an update of several calls. A repeat of the request_id gets the plan of the open update."""
        async with self._roster.model(request.model).opening:
            existing = self._operations.known(request.header.request_id, request)
            if existing is not None:
                return self.get(existing.operation.update_id).record.plan
            self._planner.refuse(request)
            if not request.header.validate_only:
                await self._end_predecessors(request)
                await self._healer.make_way(request.model)
            adapter = Adapter(name=request.adapter, version=request.version, lora_rank=request.adapter_config.lora_rank)
            if request.adapter_config.lora_rank:
                adapter.scale = scale_of(request.adapter_config)
            update = self._plan(request, timeout_s, adapter if request.adapter else None)
            if not request.header.validate_only:
                await self._start(update, request, TRAINERS_UPDATE)
        return update.record.plan

    async def begin_implicit(
        self,
        begin: BeginWeightUpdateRequest,
        timeout_s: float | None,
        *,
        request: Message | None = None,
        verb: str = TRAINERS_UPDATE,
        content: Content | None = None,
    ) -> Update:
        """Open an update for clients that name no update. With ``content``, ``request`` is the whole update."""
        async with self._roster.model(begin.model).opening:
            return await self._begin(begin, timeout_s, request or begin, verb, content, vet=vet_implicit)

    async def begin_validated(
        self,
        begin: BeginWeightUpdateRequest,
        vet: Callable[[Update], None],
        adapter: Adapter | None = None,
    ) -> Update:
        """Return the update that a request would open, without opening it. Raises the same errors as a begin."""
        async with self._roster.model(begin.model).opening:
            update = self._plan(begin, None, adapter)
            vet(update)
            return update

    async def begin_whole(
        self,
        begin: BeginWeightUpdateRequest,
        timeout_s: float | None,
        request: Message,
        content: Content,
        *,
        adapter: Adapter | None = None,
        vet: Callable[[Update], None] = lambda _: None,
    ) -> Run:
        """Open an update whose whole content is a verb's ``request``. A repeat returns the first operation.

        ``vet`` may raise an error that refuses the update.
        """
        verb = of_request(request).name
        if begin.header.validate_only:
            update = await self.begin_validated(begin, vet, adapter)
            return self._operations.hypothetical(verb, update.frozen, update.record.plan.excluded)
        async with self._roster.model(begin.model).opening:
            existing = self._operations.known(begin.header.request_id, request)
            if existing is not None:
                return existing
            return (await self._begin(begin, timeout_s, request, verb, content, adapter=adapter, vet=vet)).run

    async def _begin(
        self,
        begin: BeginWeightUpdateRequest,
        timeout_s: float | None,
        request: Message,
        verb: str,
        content: Content | None,
        *,
        vet: Callable[[Update], None],
        adapter: Adapter | None = None,
    ) -> Update:
        self._planner.refuse(begin)
        self._operations.refuse_excess(verb)
        await self._healer.make_way(begin.model)
        update = self._plan(begin, timeout_s, adapter)
        vet(update)
        return await self._start(update, request, verb, content)

    def implicit_of(self, model: str) -> Update | None:
        """Return the open update of a model if it is implicit, else None."""
        update = self._open.get(self._roster.model(model).update_id)
        return update if update is not None and update.record.request.implicit else None

    async def _end_predecessors(self, request: BeginWeightUpdateRequest) -> None:
        """End the open update of an older trainer incarnation. The newer incarnation need not wait for the lease."""

        def is_older(update: Update) -> bool:
            begin, verb = update.record.request, update.run.operation.verb
            older = begin.trainer.incarnation < request.trainer.incarnation
            return begin.model == request.model and verb == TRAINERS_UPDATE and older

        older_updates = list(filter(is_older, self._open.values()))
        self._operations.refuse_excess(TRAINERS_UPDATE, ends=[update.update_id for update in older_updates])
        for update in older_updates:
            self._planner.targets(request)  # a refused begin must not end an update
            update.owner.decide(verdict=Reason.TRAINER_FENCED.error(f"{request.trainer.name or 'a trainer'} took over"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAKE_WAY_S):
                    await update.run.ended.wait()

    def join(self, request: JoinWeightUpdateRequest) -> JoinWeightUpdateResponse:
        """Return the plan of an open update for a further source."""
        update = self.get(request.update_id)
        sources = max(1, update.record.request.num_sources)
        if not 0 < request.source < sources:
            raise Reason.FIELD_INVALID.error(
                f"source {request.source} of {sources}: further sources count from 1", field="source"
            )
        return JoinWeightUpdateResponse(header=self._roster.header(), update=update.record.plan)

    async def retry(self, request: RetryWeightUpdateRequest) -> BeginWeightUpdateResponse:
        """Plan a further attempt without the lost targets. Raises RETRIES_EXHAUSTED, QUORUM_NOT_MET, NO_TARGETS."""
        update = self._own(request.update_id, request.fencing_token) or self.get(request.update_id)
        return await self._transfer.retry(update, request)

    async def commit(self, request: CommitWeightUpdateRequest) -> Run:
        """Decide an update for the version, for its owner."""
        update = self._own(request.update_id, request.fencing_token)
        if update is None:
            return self._operations.get(request.update_id)
        async with update.planning:
            self._rolling.refuse_more(update)
            self.decide(update, request)
        return update.run

    def decide(self, update: Update, request: CommitWeightUpdateRequest) -> None:
        """Decide an open update for the version. Raises as :meth:`Rolling.decide`."""
        self._rolling.decide(update, request)

    async def commit_batch(self, request: CommitBatchRequest) -> BeginWeightUpdateResponse | Run:
        """Decide a batch for the version. Returns the plan of the next batch, or the operation if the update ends."""
        update = self._own(request.update_id, request.fencing_token)
        if update is None:
            return self._operations.get(request.update_id)
        return await self._rolling.commit_batch(update, request)

    async def abort(self, update_id: str, fencing_token: int, reason: str, cause: RlctlError | None = None) -> Run:
        """Decide an update against the version. Token 0 is an operator's override. An update that commits finishes.

        ``cause``: the owner's failure, with which the operation ends. Without a cause: CANCELLED.
        """
        update = self._own(update_id, fencing_token, override=True)
        if update is None:
            return self._operations.get(update_id)
        cause = cause or Reason.CANCELLED.error()
        message = f"aborted: {reason or cause.message}"
        update.owner.decide(
            verdict=cause.reason.error(message, field=cause.field, next_step=cause.next_step, metadata=cause.metadata)
        )
        return update.run

    def renew(self, update_id: str, fencing_token: int) -> RenewLeaseResponse:
        """Let the lease run for the full time again. Raises LEASE_EXPIRED if the update has ended."""
        update = self._own(update_id, fencing_token)
        if update is None:
            raise Reason.LEASE_EXPIRED.error(f"update {update_id} has ended", field="update_id")
        update.owner.renew(self._clock.now())
        return RenewLeaseResponse(header=self._roster.header(), lease_ttl=duration(update.owner.lease_ttl_s))

    # Calls of the coordinator.

    async def go_first(self, verb: str, slots: Sequence[Slot], within_s: float) -> None:
        """End the unrequested heals of these stages' models, before a verb by name."""
        for model in sorted({slot.model for slot in slots}):
            await self._healer.make_way_by_itself(model, verb, within_s)

    def refuse_outsider(self, slots: list[Slot], update_id: str) -> None:
        """Raise UPDATE_IN_PROGRESS if the model of a stage has a different open update."""
        for slot in slots:
            model = self._roster.models[slot.model]
            if model.update_id and model.update_id != update_id:
                raise in_progress(model)

    def refuse_target(self, slot: Slot) -> None:
        """Raise UPDATE_IN_PROGRESS if a stage is a target of an open update or a heal."""
        for update in [*self._open.values(), *self._healer.updates()]:
            if slot in (*update.targets, *update.waiting):
                raise in_progress(update.model)

    def adapter_holders(self, request: UnloadAdapterRequest) -> tuple[list[Slot], list[ExcludedStage]]:
        """Return the stages to unload an adapter at, and the excluded stages. Raises ADAPTER_NOT_FOUND."""
        model = self._roster.model(self._planner.only_model(request.header.target))
        slots, excluded = self._roster.select(Target(model=model.record.name))
        return adapters.holders(request, model, slots), excluded

    def attempt(self, update_id: str) -> int:
        """Return the present attempt of an update; 0 if the update is not open."""
        update = self._open.get(update_id)
        return update.record.plan.attempt if update is not None else 0

    async def receive(self, request: Write, run: Run, timeout_s: float, attempt: int) -> None:
        """Let the targets of an update receive tensors in an attempt."""
        update = self.get(request.header.fence.update_id)
        await self._transfer.receive(update, request, run, timeout_s, attempt=attempt)

    def is_open(self, update_id: str) -> bool:
        """Whether an update or the update of a heal is open under this id."""
        return update_id in self._open or self._healer.is_open(update_id)

    def targets(self, update_id: str, request: Message) -> list[Slot]:
        """Return the targets of an open update that a request reaches. Raises UPDATE_NOT_FOUND, NO_TARGETS."""
        update = self.get(update_id)
        reached = update.reached_by(request)
        if not reached and update.targets:
            raise Reason.NO_TARGETS.error(
                "no target of the update receives weights by this method; see the transports in its plan"
            )
        return reached

    async def heal(self, request: HealStageRequest, timeout_s: float | None) -> Run:
        """Bring stages to the published version from a heal source."""
        return await self._healer.heal(request, timeout_s)

    def set_healing(self, model: str, *, by_hand: bool) -> None:
        """Switch the automatic heals of a model off (``by_hand``) or on."""
        self._healer.policy(model, by_hand=by_hand)

    def look_after(self, slot: Slot) -> None:
        """Clear orphans at a stage, compare its first weights, and heal the stage if needed and possible."""
        self._orphans.look([slot])
        self._first_weights.look(slot)
        self._healer.look(slot)

    def _look_after(self, model: str) -> None:
        for slot in self._roster.slots.values():
            if slot.model == model:
                self.look_after(slot)

    def look_after_all(self, target: Target) -> None:
        for slot in self._roster.covered(target):
            self.look_after(slot)

    def start(self) -> None:
        """Look after all stages every :data:`LOOK_S`."""
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for slot in list(self._roster.slots.values()):
                self.look_after(slot)
            with contextlib.suppress(RlctlError):
                await self._roster.record_quarantines()
                await self._roster.pauses.record_ended()
                await self._operations.record_ended()

    async def stop(self) -> None:
        """Abort the open updates. An owner cannot continue an update at the next coordinator."""
        if self._looking is not None:
            self._looking.cancel()
        await self._first_weights.stop()
        await self._healer.stop()
        await self._orphans.stop()
        for update in list(self._open.values()):
            update.owner.decide(verdict=Reason.CANCELLED.error("the coordinator is shutting down"))

    def _plan(
        self, request: BeginWeightUpdateRequest, timeout_s: float | None, adapter: Adapter | None = None
    ) -> Update:
        try:
            plan, targets = self._planner.plan(request)
        except RlctlError:
            self._look_after(request.model)  # a heal may have ended for this update
            raise
        if adapter is not None:
            adapter.load_id = plan.update_id
        return Update(
            self._context,
            UpdateRecord(request=request, plan=plan, phase=UPDATE_PHASE_OPEN),
            self._roster.models[request.model],
            targets,
            self._clock.now() + (timeout_s or UPDATE_S),
            adapter,
        )

    async def _start(
        self,
        update: Update,
        request: Message,
        verb: str,
        content: Content | None = None,
    ) -> Update:
        """Accept a planned update. From here on a task of the update leads to its end.

        ``content``: the update has a single call.
        """
        begin, plan, model = update.record.request, update.record.plan, update.model
        request.header.request_id = plan.update_id  # type: ignore[attr-defined]
        next_record = versions.fenced if update.adapter is not None else versions.reserved
        started = asyncio.Event()

        async def work(_: Run) -> None:
            await started.wait()
            await self._see_through(update, content)

        async with _batch_counted(update), self._roster.publishing:
            # Both before a sequence and groups are reserved.
            self._operations.refuse_held(update.frozen)
            self._operations.refuse_excess(verb)
            update.abandoned = self._planner.add_groups(plan, begin, update.targets)
            record = next_record(model, begin.trainer.incarnation)
            run = await self._operations.start(
                request,
                verb=verb,
                targets=update.frozen,
                excluded=list(plan.excluded),
                work=work,
                exclusive=True,
                model=begin.model,
                update_id=plan.update_id,
                changes=[model_put(record), update.put()],
                changes_at_end=[Delete("update", plan.update_id)],
            )
            model.record = record
        update.accept(run)
        ttl = seconds(plan.lease_ttl)
        lease_until = self._clock.now() + ttl if content is None else update.deadline
        leased = content is None and not begin.implicit  # clients of implicit updates are alive while they write
        grace_s = 0.0  # an owner with a longer renewal interval may be silent and alive
        if leased and begin.HasField("renew_interval"):
            grace_s = max(self._owner_grace_s, 2 * seconds(begin.renew_interval))
        update.owner = Owner(model, update.deadline, ttl, lease_until, grace_s=grace_s)
        self._open[plan.update_id] = update
        if run.given_up:
            update.owner.decide(verdict=Reason.CANCELLED.error("cancelled while it was begun"))
        model.update_id = plan.update_id
        model.update_owner = begin.trainer.name or "unnamed"
        self._roster.changed()
        self.joining.forget(begin.model)
        started.set()
        return update

    async def _see_through(self, update: Update, content: Content | None) -> None:
        # A separate task, so that the lease is watched meanwhile. The next update leaves the remaining groups.
        leaving = asyncio.create_task(update.leave_groups(update.abandoned))
        try:
            commit = (Commit if update.adapter is None else CommitAdapter)(update, self._context)
            if update.rolls_in_place:
                await self._rolling.see_through(update, commit, lambda: self._written(update, content))
            else:
                await self._written(update, content)
                await commit.commit(update.owner.expected)
        except BaseException as error:
            if not update.published:
                cause = typed(error)
                update.owner.decide(verdict=cause)
                await update.abort(cause)
                if cause.reason is Reason.LEASE_EXPIRED:
                    self._healer.abandoned(update.frozen)
                await update.leave_groups(self._groups.unformed(update.record.plan))
            raise
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            del self._open[update.update_id]
            update.ended = True
            update.batch_done.set()
            self._let_go(update)
            update.model.update_id = update.model.update_owner = ""
            update.model.batch = tuple
            update.model.lease_until = None
            self._roster.changed()
            self._look_after(update.model.record.name)

    def _let_go(self, update: Update) -> None:
        """Stop withholding the admitted versions. State and quarantine then decide whether a target may serve."""
        for slot in update.frozen:
            if slot.restoring:
                slot.restoring = False
                self._context.peers.grant(slot)

    async def _written(self, update: Update, content: Content | None) -> None:
        """Wait until the targets (of the present batch) are written, and the owner has decided for the version."""
        if content is not None and not update.owner.decided.is_set():
            await content(update)
        await self._decision(update)
        async with update.requests.all_turns():  # the result of the last write is recorded at its end
            update.leave_out()

    async def _decision(self, update: Update) -> None:
        """Wait for the owner's decision, at most to the end of the lease or the update's deadline.

        Raises the verdict of a decision against the version.
        """
        while not update.owner.decided.is_set():
            await update.owner.wait_decided(self._clock.now())
            if update.owner.decided.is_set():
                break
            if self._clock.now() >= update.deadline:
                raise Reason.DEADLINE_EXCEEDED.error("the update's time was up before it was committed")
            late_s = self._clock.now() - update.owner.lease_until
            if late_s >= 0 and (update.is_written_to or late_s > STOPPED_S):
                update.owner.renew(self._clock.now())
            if self._clock.now() >= update.owner.lease_until:
                owner = update.model.update_owner
                raise Reason.LEASE_EXPIRED.error(f"{owner} {update.owner.silence}")
        if update.owner.verdict is not None:
            raise update.owner.verdict

    def get(self, update_id: str) -> Update:
        """Return an open update. Raises UPDATE_NOT_FOUND."""
        if update_id not in self._open:
            raise Reason.UPDATE_NOT_FOUND.error(f"no update {update_id!r} is open", field="update_id")
        return self._open[update_id]

    def _own(self, update_id: str, token: int, *, override: bool = False) -> Update | None:
        """Return an open update for the owner of its token, or None for an ended update.

        Raises UPDATE_FENCED, UPDATE_NOT_FOUND.
        """
        update = self._open.get(update_id)
        if update is None:
            try:
                ended = self._operations.get(update_id).operation
            except RlctlError:
                return self.get(update_id)
            return None if ended.update_id == update_id else self.get(update_id)
        if token != update.record.plan.fencing_token and not (override and token == 0):
            raise Reason.UPDATE_FENCED.error("the fencing token is not the owner's", field="fencing_token")
        return update


@contextlib.asynccontextmanager
async def _batch_counted(update: Update) -> AsyncIterator[None]:
    """Count the batch of a rolling update in place as out of service from its plan on, unless the block fails."""
    if update.rolls_in_place:
        update.model.batch = lambda: update.targets
    try:
        yield
    except BaseException:
        update.model.batch = tuple
        raise


def vet_implicit(update: Update) -> None:
    """Raise if an implicit update cannot be verified without a digest, which its clients cannot give.

    A refusal before the writes is better than an error after the writes.
    """
    if update.record.request.options.verify != VERIFICATION_LEVEL_EXPECTED:
        update.levels(NOTHING)
