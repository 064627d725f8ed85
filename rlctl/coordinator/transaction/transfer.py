"""The transfer of an update at its targets: joins of groups, writes, further attempts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import acknowledged
from rlctl.contract.verbs import of_request
from rlctl.coordinator.fleet.model_state import model_put
from rlctl.coordinator.fleet.slot import Slot, names
from rlctl.coordinator.operations.collective_fanout import Together
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction import process_groups
from rlctl.coordinator.transaction.planner import Planner
from rlctl.coordinator.transaction.process_groups import GroupBook
from rlctl.coordinator.transaction.timeline import OnResult
from rlctl.coordinator.transaction.update import Update
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_UNKNOWN
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse, RetryWeightUpdateRequest
from rlctl.v1.verbs_pb2 import (
    InitWeightsUpdateGroupRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
)

RETURN_S = 5.0
"""Time for a broken link to return. On a busy machine links break although all processes run."""

Write = UpdateWeightsFromDistributedRequest | UpdateWeightsFromTensorRequest


class Transfer:
    """Joins, writes and further attempts of all updates."""

    def __init__(self, context: Context, groups: GroupBook, planner: Planner) -> None:
        self._roster = context.roster
        self._fanout = context.fanout
        self._journal = context.journal
        self._clock = context.clock
        self._groups = groups
        self._planner = planner

    async def join_group(
        self,
        request: InitWeightsUpdateGroupRequest,
        targets: list[Slot],
        run: Run,
        timeout_s: float,
        *,
        patient_s: float = 0.0,
    ) -> None:
        """Join every rank of the targets into a group, once each rank reports that it can join.

        ``patient_s``: longest wait for an unreachable store. Clients may open their store after the request.
        """
        process_groups.place(request, targets)
        model = targets[0].model
        results = await self._together(targets, run, [request.group_name]).join(request, timeout_s, patient_s=patient_s)
        if all(acknowledged(result, update=True) for result in results):
            self._groups.formed(model, request.group_name)
        else:
            self._groups.broke(model)

    async def receive(
        self, update: Update, request: Write, run: Run, timeout_s: float, *, attempt: int | None = None
    ) -> None:
        """Let targets receive tensors of an update, one request after the other.

        ``attempt``: the attempt at the arrival of the request. None: the present attempt.
        """
        plan = update.record.plan
        attempt = plan.attempt if attempt is None else attempt
        async with contextlib.AsyncExitStack() as writing:
            for turn in update.requests.turns(request):
                await writing.enter_async_context(turn)
            _refuse_decided(update)
            if plan.attempt != attempt or not set(run.operation.targets) <= set(names(update.targets)):
                raise Reason.GROUP_FAILED.error(f"the write is for an attempt before attempt {plan.attempt}")
            if update.broken:
                raise Reason.GROUP_FAILED.error("another write of this attempt has failed")
            group_names: list[str] = []
            if isinstance(request, UpdateWeightsFromDistributedRequest):
                group_names = sorted({bucket.group_name or request.group_name for bucket in request.buckets})
            if run.given_up:
                update.fail_write()
                fanout = self._together(update.reached_by(request), run, group_names)
                fanout.leave()  # otherwise the source would wait in the groups
                await fanout.has_left()
                run.refuse_given_up()
            try:
                await update.ready()
            except RlctlError:
                # A target that is lost before the write costs an attempt, as a target that is lost in the write does.
                update.fail_write()
                for result in update.unprepared:
                    run.add(result)
                raise
            try:
                targets = update.reached_by(request)
                verb = of_request(request).name
                with update.timeline.step(verb, targets, lambda: update.transports) as record:
                    fanout = self._together(targets, run, group_names, record)
                    await fanout.run(request, timeout_s, aside=update.aside)
            finally:
                results = run.operation.stage_results
                # A client that names no update may mean a different update. A stray write does not harm a begun update.
                stray = update.record.request.implicit and update.received and _in_no_group(results)
                if not stray:
                    update.received += results
                    if not all(acknowledged(r, update=True) for r in results):
                        update.fail_write()
                        if group_names:
                            self._groups.broke(update.model.record.name)

    def _together(
        self, targets: Sequence[Slot], run: Run, group_names: Sequence[str], record: OnResult = lambda _: None
    ) -> Together:
        """Return the collective fan-out of an operation. A cancellation makes the targets leave the groups."""

        def on_result(result: StageResult) -> None:
            run.add(result)
            record(result)

        fanout = Together(self._fanout, self._clock, targets, run.operation.operation_id, group_names, on_result)
        run.cancel = fanout.leave
        return fanout

    async def retry(self, update: Update, request: RetryWeightUpdateRequest) -> BeginWeightUpdateResponse:
        """Plan a further attempt without the lost targets. Raises RETRIES_EXHAUSTED, QUORUM_NOT_MET, NO_TARGETS."""
        plan = update.record.plan
        async with update.planning:
            if request.failed_attempt < plan.attempt:
                return plan  # a repeat
            async with update.requests.all_turns():
                return await self._again(update, request)

    async def _again(self, update: Update, request: RetryWeightUpdateRequest) -> BeginWeightUpdateResponse:
        plan, begin = update.record.plan, update.record.request
        self._refuse_retry(update, request)
        lost = await self._lost(update)
        self._refuse_retry(update, request)  # the owner may have decided meanwhile
        planned = {target.slot: target.incarnation for target in plan.targets}
        num_remaining = update.remaining - len(lost)
        if num_remaining < update.quorum:
            raise update.short_of_quorum(num_remaining, f"gone: {', '.join(names(lost))}")
        if len(lost) == len(update.targets) and not update.waiting:
            raise Reason.NO_TARGETS.error(
                f"no target remains in the last batch; lost: {', '.join(names(lost))}",
                next_step="Lost targets are healed when they return; stages of earlier batches serve the version.",
            )
        undo, broken = update.start_over(lost), update.broken
        update.broken = False
        answers = _answers(update)
        received, update.received = update.received, []
        remaining = [target for target in plan.targets if target.slot not in names(lost)]
        del plan.targets[:]
        plan.targets.extend(remaining)
        plan.lost.extend(names(lost))
        plan.attempt += 1
        self._groups.broke(begin.model)
        async with self._roster.publishing:
            try:
                _refuse_decided(update)  # the update may have ended meanwhile
                abandoned = self._planner.add_groups(plan, begin, update.targets)
                await self._journal.write([model_put(update.model.record), update.put()])
            except BaseException:
                undo()  # a repeat plans it again
                update.broken, update.received = broken, received
                raise
        results = {slot: _result_of_lost(slot, planned[slot.name], answers) for slot in lost}
        for result in results.values():
            update.run.add(result)
        await self._roster.quarantine({slot: result.error for slot, result in results.items()})
        await update.leave_groups(abandoned)
        return plan

    async def _lost(self, update: Update) -> list[Slot]:
        """Return the targets that a further attempt must exclude. If too few would remain, targets with broken links
        first get some time to return.
        """

        def lost(*, away: bool = True) -> list[Slot]:
            plan, answers = update.record.plan, _answers(update)
            lost_targets = [slot for slot in update.targets if _is_gone(slot, plan, answers)]
            return [slot for slot in lost_targets if away or not _is_away(slot)]

        def enough(lost: Sequence[Slot]) -> bool:
            return update.remaining - len(lost) >= update.quorum

        if not enough(lost()) and enough(lost(away=False)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(RETURN_S, update.deadline - self._clock.now())):
                    await self._roster.until(lambda: enough(lost()))
        return lost()

    def _refuse_retry(self, update: Update, request: RetryWeightUpdateRequest) -> None:
        _refuse_decided(update)
        if request.failed_attempt > update.record.plan.attempt:
            raise Reason.FIELD_INVALID.error(
                f"the update is at attempt {update.record.plan.attempt}", field="failed_attempt"
            )
        if update.record.plan.attempt > update.record.request.retries:
            raise Reason.RETRIES_EXHAUSTED.error(f"the update was begun with retries = {update.record.request.retries}")


def _refuse_decided(update: Update) -> None:
    if update.owner.decided.is_set():
        raise update.owner.verdict or Reason.ILLEGAL_STATE.error("the update is being committed")


def _in_no_group(results: Sequence[StageResult]) -> bool:
    """Whether no target is in the group of a write. No source then waits in the group, and no tensor was received."""
    return bool(results) and all(
        result.outcome == OUTCOME_REJECTED and result.error.reason == Reason.GROUP_NOT_FOUND.name for result in results
    )


def _answers(update: Update) -> list[StageResult]:
    """Return the answers of the present attempt that may show the loss of a target."""
    return [*update.unprepared, *update.received]


def _is_gone(slot: Slot, plan: BeginWeightUpdateResponse, answers: Sequence[StageResult]) -> bool:
    """Whether a further attempt must exclude a target: unreachable, restarted, or without one of its ranks or its
    server.
    """
    planned = next(target.incarnation for target in plan.targets if target.slot == slot.name)
    if _is_away(slot) or slot.record.incarnation != planned:
        return True
    return bool(slot.dead_ranks()) or any(_tells_loss(answer) for answer in answers if answer.slot == slot.name)


def _tells_loss(answer: StageResult) -> bool:
    """Whether a stage does not know what a rank did, or does not reach its server.

    A stage may notice the end of its server only after this answer.
    """
    refused = answer.outcome == OUTCOME_REJECTED and answer.error.reason == Reason.UNREACHABLE.name
    return refused or any(rank.outcome == OUTCOME_UNKNOWN for rank in answer.rank_results)


def _is_away(slot: Slot) -> bool:
    """Whether a target has no link at present. The link may return in a moment."""
    return slot.absent


def _result_of_lost(slot: Slot, incarnation: int, answers: Sequence[StageResult]) -> StageResult:
    """Return the result of a target that further attempts exclude. ``incarnation``: of the plan."""
    for answer in answers:
        if answer.slot == slot.name and (
            answer.outcome not in (OUTCOME_APPLIED, OUTCOME_REJECTED) or _tells_loss(answer)
        ):
            return answer
    return StageResult(
        slot=slot.name,
        incarnation=slot.record.incarnation,
        outcome=OUTCOME_UNKNOWN,
        error=_loss(slot, incarnation).detail(),
        state=slot.state,
    )


def _loss(slot: Slot, incarnation: int) -> RlctlError:
    """Return why a target is lost."""
    if slot.record.incarnation != incarnation:
        return Reason.INCARNATION_FENCED.error("the stage was restarted during the attempt", outcome=OUTCOME_UNKNOWN)
    if dead_rank := slot.dead_rank():
        return Reason.RANK_LOST.error(dead_rank, outcome=OUTCOME_UNKNOWN)
    if slot.failure is not None:
        return Reason.ENGINE_FAILED.error(slot.failure.reason, outcome=OUTCOME_UNKNOWN)
    cause = f": {slot.away}" if slot.away else ""
    return Reason.UNREACHABLE.error(f"the link to {slot.name} was lost{cause}", outcome=OUTCOME_UNKNOWN)
