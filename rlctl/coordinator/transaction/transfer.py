"""The transfer of an update at its targets: joins of groups, writes, further attempts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import acknowledged
from rlctl.contract.verbs import of_request
from rlctl.coordinator.fleet.roster import ABSENT, Roster, Slot, model_put, names
from rlctl.coordinator.operations.collective_fanout import Together
from rlctl.coordinator.operations.fanout import Fanout
from rlctl.coordinator.operations.operations import Run
from rlctl.coordinator.transaction import process_groups
from rlctl.coordinator.transaction.planner import Planner
from rlctl.coordinator.transaction.process_groups import GroupBook
from rlctl.coordinator.transaction.timeline import OnResult
from rlctl.coordinator.transaction.transaction import Session
from rlctl.coordinator.transaction.verification_levels import NOTHING, Expected
from rlctl.ports import Clock, Journal
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_UNKNOWN
from rlctl.v1.journal_pb2 import UPDATE_PHASE_WRITING
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse, RetryWeightUpdateRequest
from rlctl.v1.verbs_pb2 import (
    InitWeightsUpdateGroupRequest,
    UpdateWeightsFromDistributedRequest,
    UpdateWeightsFromTensorRequest,
)

RETURN_S = 5.0
"""Time for a broken link to be made again; on a busy machine links break though nobody is gone."""

Write = UpdateWeightsFromDistributedRequest | UpdateWeightsFromTensorRequest


@dataclass
class OpenUpdate:
    """An update that has not ended.

    Attributes:
        lease_until: the owner must renew before, on the clock's ``now``.
        decided: its owner, an operator or the clock has decided it.
        expected: decided for the version: what the sources say of the weights.
        verdict: decided against it: why.
        received: what its targets answered to the writes of the present attempt.
        broken: a write of the present attempt has failed.
        abandoned: groups of earlier updates that its targets may still be in.
        stopped: decided against it while it was being committed: counts for the batches that have not begun.
        turned: set once the present batch is committed, or the update has ended.
        ended: it is not open any more.
        planning: held while it is planned anew, for another attempt or the next batch: nobody is told the half of it.
        owner_grace_s: seconds that its owner may be silent after a failed write; 0: no shorter than the lease.
    """

    session: Session
    run: Run
    lease_ttl_s: float
    lease_until: float
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    expected: Expected = NOTHING
    verdict: RlctlError | None = None
    received: list[StageResult] = field(default_factory=list)
    broken: bool = False
    abandoned: list[str] = field(default_factory=list)
    stopped: RlctlError | None = None
    turned: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)
    owner_grace_s: float = 0.0
    _silence_s: float = 0.0
    _limit: asyncio.Timeout | None = None

    @property
    def is_heard(self) -> bool:
        """Whether a client that cannot renew its lease is there all the same: a write of its is under way."""
        return self.session.record.request.implicit and any(lock.locked() for lock in self.session.writing.values())

    def renew(self, now: float) -> None:
        """Let the lease run for its full time from then on."""
        self._run_until(now + self.lease_ttl_s, self.lease_ttl_s, now)

    def fail(self, now: float) -> None:
        """A write of the present attempt has failed. A living owner retries, aborts or renews. A silent owner counts as
        dead: the death of a source is the most frequent cause of a broken group.
        """
        self.broken = True
        if self.owner_grace_s and now + self.owner_grace_s < self.lease_until:
            self._run_until(now + self.owner_grace_s, self.owner_grace_s, now)

    def _run_until(self, until: float, silence_s: float, now: float) -> None:
        self.lease_until = self.session.model.lease_until = until
        self._silence_s = silence_s
        if self._limit is not None and not self._limit.expired():
            limit = min(until, self.session.deadline) - now
            self._limit.reschedule(asyncio.get_running_loop().time() + max(0.0, limit))

    async def wait_decided(self, now: float) -> None:
        """Return once it is decided, its lease has run out or its deadline has passed."""
        until = min(self.lease_until, self.session.deadline)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - now) as self._limit:
                await self.decided.wait()
        self._limit = None

    @property
    def silence(self) -> str:
        """How long its owner was not heard, once the lease has run out."""
        if 0 < self._silence_s < self.lease_ttl_s:
            return f"was not heard for {self._silence_s:g} s after a write had failed"
        return f"did not renew the lease for {self.lease_ttl_s:g} s"

    def decide(self, *, expected: Expected = NOTHING, verdict: RlctlError | None = None) -> None:
        """For the version (what the sources say of it) or against it (why). The first word counts, batch by batch."""
        if not self.decided.is_set():
            self.expected, self.verdict = expected, verdict
            self.decided.set()
        elif self.stopped is None:
            self.stopped = verdict

    def turn(self) -> None:
        """The next batch is open."""
        self.received, self.broken = [], False
        self.decided, self.expected = asyncio.Event(), NOTHING
        if self.stopped is not None:
            self.decide(verdict=self.stopped)
        turned, self.turned = self.turned, asyncio.Event()
        turned.set()


class Attempts:
    """Joins, writes and further attempts."""

    def __init__(
        self, roster: Roster, fanout: Fanout, book: GroupBook, planner: Planner, journal: Journal, clock: Clock
    ) -> None:
        self._roster = roster
        self._fanout = fanout
        self._book = book
        self._planner = planner
        self._journal = journal
        self._clock = clock

    async def join_group(
        self,
        request: InitWeightsUpdateGroupRequest,
        targets: list[Slot],
        run: Run,
        timeout_s: float,
        *,
        patient_s: float = 0.0,
    ) -> None:
        """Join every rank of the targets into a group, once each has found that it can.

        ``patient_s``: how long a store that cannot be reached may take to come: clients open theirs after they asked.
        """
        process_groups.place(request, targets)
        model = targets[0].model
        results = await self._together(targets, run, [request.group_name]).join(request, timeout_s, patient_s=patient_s)
        if all(acknowledged(result, update=True) for result in results):
            self._book.formed(model, request.group_name)
        else:
            self._book.broke(model)

    async def receive(
        self, opened: OpenUpdate, request: Write, run: Run, timeout_s: float, *, attempt: int | None = None
    ) -> None:
        """Let targets of an update take in what its sources send; one request after the other.

        ``attempt``: the one that was under way when the request came; None: it comes now.
        """
        session, plan = opened.session, opened.session.record.plan
        attempt = plan.attempt if attempt is None else attempt
        async with contextlib.AsyncExitStack() as writing:
            for turn in session.turns_of(request):
                await writing.enter_async_context(turn)
            if opened.decided.is_set():
                raise opened.verdict or Reason.ILLEGAL_STATE.error("the update is being committed")
            if plan.attempt != attempt or not set(run.operation.targets) <= set(names(session.targets)):
                raise Reason.GROUP_FAILED.error(
                    f"the write was meant for targets and groups before attempt {plan.attempt}"
                )
            if opened.broken:
                raise Reason.GROUP_FAILED.error("another write of this attempt has failed")
            group_names: list[str] = []
            if isinstance(request, UpdateWeightsFromDistributedRequest):
                group_names = sorted({bucket.group_name or request.group_name for bucket in request.buckets})
            if run.given_up:
                opened.fail(self._clock.now())
                together = self._together(session.reached_by(request), run, group_names)
                together.leave()  # or its source would wait in them for those that never come
                await together.left()
                run.refuse_given_up()
            try:
                await session.ready()
            except RlctlError:
                # One that is gone by now costs an attempt, as if it had gone a moment later.
                opened.fail(self._clock.now())
                for result in session.unprepared:
                    run.add(result)
                raise
            try:
                targets = session.reached_by(request)
                verb = of_request(request).name
                with session.timeline.step(verb, targets, lambda: session.transports) as record:
                    together = self._together(targets, run, group_names, record)
                    await together.run(request, timeout_s, aside=session.aside)
            finally:
                results = run.operation.stage_results
                # A client that names no update may mean another one's: it harms none that has begun.
                stray = session.record.request.implicit and opened.received and _in_no_group(results)
                if not stray:
                    opened.received += results
                    if not all(acknowledged(r, update=True) for r in results):
                        opened.fail(self._clock.now())
                        if group_names:
                            self._book.broke(session.model.record.name)

    def _together(
        self, targets: Sequence[Slot], run: Run, group_names: Sequence[str], record: OnResult = lambda _: None
    ) -> Together:
        """What targets do for an operation; a cancellation makes them leave."""

        def on_result(result: StageResult) -> None:
            run.add(result)
            record(result)

        together = Together(self._fanout, self._clock, targets, run.operation.operation_id, group_names, on_result)
        run.cancel = together.leave
        return together

    async def retry(self, opened: OpenUpdate, request: RetryWeightUpdateRequest) -> BeginWeightUpdateResponse:
        """Plan another attempt, without the targets that are gone. Raises RETRIES_EXHAUSTED, QUORUM_NOT_MET."""
        plan = opened.session.record.plan
        async with opened.planning:
            if request.failed_attempt < plan.attempt:
                return plan  # a repeat
            async with opened.session.taken_in():
                return await self._again(opened, request)

    async def _again(self, opened: OpenUpdate, request: RetryWeightUpdateRequest) -> BeginWeightUpdateResponse:
        session, plan, begin = opened.session, opened.session.record.plan, opened.session.record.request
        self._refuse_retry(opened, request)
        lost = await self._lost(opened)
        self._refuse_retry(opened, request)  # it may have been decided meanwhile
        left = session.left - len(lost)
        if left < session.quorum:
            raise session.short_of_quorum(left, f"gone: {', '.join(names(lost))}")
        if len(lost) == len(session.targets) and not session.waiting:
            raise Reason.NO_TARGETS.error(
                f"nobody is left in the last batch; gone: {', '.join(names(lost))}",
                next_step="What is gone is healed when it is back; stages of the batches before serve the version.",
            )
        undo, broken = session.start_over(lost), opened.broken
        opened.broken = False
        received, opened.received = opened.received, []
        remaining = [target for target in plan.targets if target.slot not in names(lost)]
        del plan.targets[:]
        plan.targets.extend(remaining)
        plan.lost.extend(names(lost))
        plan.attempt += 1
        self._book.broke(begin.model)
        phase = session.record.phase if session.published else UPDATE_PHASE_WRITING
        async with self._roster.publishing:
            abandoned = self._planner.add_groups(plan, begin, session.targets)
            try:
                await self._journal.write([model_put(session.model.record), session.put(phase)])
            except BaseException:
                undo()  # a repeat plans it again
                opened.broken, opened.received = broken, received
                raise
        answers = {slot: _what_is_known(slot, received) for slot in lost}
        for answer in answers.values():
            opened.run.add(answer)
        await self._roster.quarantine({slot: answer.error for slot, answer in answers.items()})
        await session.leave_groups(abandoned)
        return plan

    async def _lost(self, opened: OpenUpdate) -> list[Slot]:
        """The targets that another attempt is in vain for. Where too few would be left, those of broken links are given
        some time to come back.
        """
        session = opened.session

        def lost(*, away: bool = True) -> list[Slot]:
            plan, received = session.record.plan, opened.received
            gone = [slot for slot in session.targets if _is_gone(slot, plan, received)]
            return [slot for slot in gone if away or not _is_away(slot)]

        def enough(lost: Sequence[Slot]) -> bool:
            return session.left - len(lost) >= session.quorum

        if not enough(lost()) and enough(lost(away=False)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(RETURN_S, session.deadline - self._clock.now())):
                    await self._roster.until(lambda: enough(lost()))
        return lost()

    def _refuse_retry(self, opened: OpenUpdate, request: RetryWeightUpdateRequest) -> None:
        session = opened.session
        if opened.decided.is_set():
            raise opened.verdict or Reason.ILLEGAL_STATE.error("the update is being committed")
        if request.failed_attempt > session.record.plan.attempt:
            raise Reason.FIELD_INVALID.error(
                f"the update is at attempt {session.record.plan.attempt}", field="failed_attempt"
            )
        if session.record.plan.attempt > session.record.request.retries:
            raise Reason.RETRIES_EXHAUSTED.error(f"it was begun with retries = {session.record.request.retries}")


def _in_no_group(results: Sequence[StageResult]) -> bool:
    """Whether a write came over a group that no target is in: no source waits there, and nobody took anything in."""
    return bool(results) and all(
        result.outcome == OUTCOME_REJECTED and result.error.reason == Reason.GROUP_NOT_FOUND.name for result in results
    )


def _is_gone(slot: Slot, plan: BeginWeightUpdateResponse, received: Sequence[StageResult]) -> bool:
    """Whether another attempt is in vain for a target: it cannot be reached, was restarted, or lost a rank."""
    planned = next(target.incarnation for target in plan.targets if target.slot == slot.name)
    if _is_away(slot) or slot.record.incarnation != planned:
        return True
    ranks = [rank for result in received if result.slot == slot.name for rank in result.rank_results]
    return bool(slot.dead_ranks()) or any(rank.outcome == OUTCOME_UNKNOWN for rank in ranks)


def _is_away(slot: Slot) -> bool:
    """Whether there is no link to a target; there may be one again in a moment."""
    return slot.state in ABSENT or slot.commander is None or slot.commander.lost


def _what_is_known(slot: Slot, received: Sequence[StageResult]) -> StageResult:
    """What is on record of a target that was left out of further attempts."""
    for result in received:
        if result.slot == slot.name and result.outcome not in (OUTCOME_APPLIED, OUTCOME_REJECTED):
            return result
    error = Reason.UNREACHABLE.error(f"{slot.name} was lost during an attempt", outcome=OUTCOME_UNKNOWN)
    return StageResult(
        slot=slot.name,
        incarnation=slot.record.incarnation,
        outcome=OUTCOME_UNKNOWN,
        error=error.detail(),
        state=slot.state,
    )
