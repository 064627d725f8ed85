"""The end of an update: finish at every target, flush, verify, publish, admit, resume.

Nothing of a version is served before it is published; after that the update is finished, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError, from_detail, typed
from rlctl.coordinator.fleet import versions
from rlctl.coordinator.fleet.roster import ABSENT, Roster, Slot, model_put
from rlctl.coordinator.fleet.stage_links import Peers
from rlctl.coordinator.operations.operations import Run
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.transaction import Session
from rlctl.coordinator.transaction.verification import compute, verify
from rlctl.coordinator.transaction.verification_levels import Expected, Level
from rlctl.ports import Clock, Put
from rlctl.v1 import common_pb2
from rlctl.v1.common_pb2 import (
    EVIDENCE_VERIFIED,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    VERIFICATION_LEVEL_EXPECTED,
    ErrorDetail,
)
from rlctl.v1.journal_pb2 import UPDATE_PHASE_COMMITTING, UPDATE_PHASE_PUBLISHED
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_OK,
    OPERATION_STATE_PARTIAL,
    PHASE_KIND_ADMIT,
    PHASE_KIND_PUBLISH,
    StageResult,
)
from rlctl.v1.verbs_pb2 import (
    ADAPTER_POLICY_DROP,
    AFTER_UPDATE_STAY_PAUSED,
    UPDATE_KIND_DELTA,
    AbortUpdateRequest,
    CommitUpdateRequest,
    FlushCacheRequest,
    PauseGenerationRequest,
    SealUpdateRequest,
)

log = logging.getLogger(__name__)

Levels = Mapping[str, Level]
"""At which level each target is verified, by slot."""

ADMISSION_S = 10.0
"""Time that a grant may take to a stage and its report back."""


NOT_CONFIRMED = "did not confirm"


class Finish:
    """Finishes one update whose targets have been written into."""

    def __init__(self, session: Session, roster: Roster, peers: Peers, clock: Clock) -> None:
        self._session = session
        self._roster = roster
        self._peers = peers
        self._clock = clock
        self._paused_s = 0.0
        self._fingerprints = b""
        self._decode: frozenset[str] = frozenset()  # slots of which decode was compared with prefill

    async def commit(self, run: Run, expected: Expected) -> None:
        """Complete, flush, verify, publish, admit, resume, batch by batch. Raises when the version was not published.

        Shadow copies are complete and verified before anything is paused; what is in place is one batch.
        """
        session = self._session
        levels = await self._written(expected)
        waiting, digest = list(session.targets), ""
        if session.staged:
            waiting, digest = await self._seal(run, levels, expected)
            self._refuse_short(run, len(waiting))
        await session.advance(UPDATE_PHASE_COMMITTING)
        size = session.record.request.rollout.max_unavailable or len(waiting)
        try:
            while waiting:
                batch, waiting = waiting[:size], waiting[size:]
                waiting = await self._roll(run, batch, waiting, levels, expected, digest)
                session.timeline.turn()
        except Exception as error:
            if not session.published:
                raise
            await self.break_off(run, error)
        else:
            self._conclude(run)

    async def commit_batch(self, run: Run, expected: Expected) -> None:
        """Complete, flush, verify, publish, admit and resume the present batch of an update that rolls in place; with
        the last one it is finished. Raises when the version was not published, or what broke the rolling.
        """
        session = self._session
        levels = await self._written(expected)
        if not session.published:
            await session.advance(UPDATE_PHASE_COMMITTING)
        session.waiting = await self._roll(run, session.targets, session.waiting, levels, expected, "")
        if not session.waiting:
            self._conclude(run)

    async def break_off(self, run: Run, error: Exception) -> None:
        """End an update that rolls after the batches that serve its version: the rest is STALE or DIRTY. Also for a
        defect: nobody else would take the version before it out of service.
        """
        session = self._session
        self._log_unfinished(run, error)
        try:
            await self._close(run, session.model.record.model_digest, typed(error))
        except RlctlError as again:
            self._log_unfinished(run, again)
            # What became of them could not be recorded; that they have read the weights is no answer to the commit.
            done = {slot.name for slot in session.done}
            read = [r.slot for r in run.operation.stage_results if r.outcome == OUTCOME_APPLIED and r.slot not in done]
            for slot in read:
                run.add(StageResult(slot=slot, outcome=OUTCOME_UNKNOWN, error=again.detail()))
        self._conclude(run, typed(error))
        if run.operation.state == OPERATION_STATE_OK:
            run.operation.state = OPERATION_STATE_PARTIAL
            run.operation.error.CopyFrom(typed(error).detail())

    def _conclude(self, run: Run, cause: RlctlError | None = None) -> None:
        """``cause``: what broke it off, also for targets that could not even be told."""
        self._stamp(run)
        whole = len(self._present(run, self._session.done)) == len(self._session.frozen)
        run.conclude(update=True, cause=cause)
        if not whole or self._left_out() or any(r.HasField("warning") for r in run.operation.stage_results):
            # What became of the others may be unknown, but they are quarantined, and the version is published.
            run.operation.state = OPERATION_STATE_PARTIAL

    async def _roll(
        self,
        run: Run,
        batch: Sequence[Slot],
        waiting: list[Slot],
        levels: Levels,
        expected: Expected,
        digest: str,
    ) -> list[Slot]:
        """Bring a batch (all targets, unless the update rolls) to the version; those that are left to be brought to it.

        From the first batch that serves it the version is published; what fails later only ends the rolling.
        """
        session = self._session
        slots = await self._stop(run, batch) if session.staged else batch
        held: list[Slot] = []
        if session.published:
            held = [slot for slot in slots if not slot.record.HasField("quarantine")]
            await self._peers.hold_back(held, "its batch of a rolling update is not verified yet")
        good, found = await self._complete(run, slots, levels, expected)
        session.done += good
        failed = [slot for slot in batch if slot not in good]
        for slot in batch:
            slot.restoring = slot in failed
        await self._roster.lift_quarantine([slot for slot in held if slot in good])
        if waiting:
            await session.step(AbortUpdateRequest(reason=NOT_CONFIRMED), failed, cleanup=True)
        if len(session.done) + len(waiting) < session.quorum:
            if not session.published:
                self._refuse_short(run, len(session.done) + len(waiting))
            waiting = []  # what did not go well is not tried on the rest
        if waiting and not session.done:
            return waiting
        if waiting:
            with session.timeline.phase(PHASE_KIND_PUBLISH):
                async with self._silencing([*good, *self._at_admitted()]):
                    await self._publish(run, good, digest or found, beside=session.model.admitted)
        else:
            with session.timeline.phase(PHASE_KIND_PUBLISH):
                await self._close(run, digest or found)
        await self._serve(run, good)
        return waiting

    async def _close(self, run: Run, digest: str, error: RlctlError | None = None) -> None:
        """No version but this one is served any more: not by the targets that did not confirm, not by anybody else.
        ``error``: why those that it has not come to are left out.
        """
        session = self._session
        if session.published:  # whatever fails from here on: nobody is granted the version before again
            versions.close(session.model)
        async with self._silencing(session.done):
            good = self._present(run, session.done)
            if not session.published:
                self._refuse_short(run, len(good))
            left = [slot for slot in session.frozen if slot not in good]
            stopped = error or Reason.CANCELLED.error("the update ended before it came to this target")
            # That one has read the weights is no answer to the commit.
            said = {result.slot for result in run.operation.stage_results if result.outcome != OUTCOME_APPLIED}
            answered = said - session.missed
            for result in await session.step(AbortUpdateRequest(reason=NOT_CONFIRMED), left, cleanup=True):
                if result.slot not in answered:
                    session.file(run, result, stopped)
            try:
                await self._publish(run, good, digest)
            finally:
                if session.published and session.adapter is None:
                    for slot in self._roster.slots.values():
                        slot.late = slot.late or (slot.model == session.model.record.name and slot not in good)

    async def _serve(self, run: Run, good: Sequence[Slot]) -> None:
        """Wait until targets that hold the published version serve it, and let them generate."""
        try:
            await self._await_admission(good)
            await self._resume_after(run, good)
        except RlctlError as error:
            self._log_unfinished(run, error)
            self._warn(run, dict.fromkeys((slot.name for slot in good), error.detail()))
        if self._session.paused_at is not None:
            self._paused_s = max(self._paused_s, self._clock.now() - self._session.paused_at)

    @staticmethod
    def _log_unfinished(run: Run, error: Exception) -> None:
        defect = None if isinstance(error, RlctlError) else error
        log.warning(
            "%s is published, but what follows failed: %s", run.operation.weight_version.label, error, exc_info=defect
        )

    def _refuse_short(self, run: Run, count: int) -> None:
        if count < self._session.quorum:
            raise self._session.short_of_quorum(count, self._cause(run))

    async def restore(self, run: Run, expected: Expected) -> None:
        """Complete, flush, verify, admit, resume, for targets that are brought to a version that is published already.

        Raises when one did not confirm.
        """
        levels = await self._written(expected)
        await self._session.advance(UPDATE_PHASE_COMMITTING)
        good, _ = await self._complete(run, self._session.targets, levels, expected)
        if len(good) < len(self._session.frozen):
            raise self._session.short_of_quorum(len(good), self._cause(run))
        await self._roster.lift_quarantine(good)
        for slot in good:
            slot.restoring = False
            self._peers.grant(slot)
        await self._serve(run, good)
        self._stamp(run)

    async def _written(self, expected: Expected) -> Levels:
        """Once all targets have been written into: at which level each is verified."""
        self._fingerprints = expected.fingerprints
        # A delta may have turned out to differ in nothing from its base.
        if not self._session.written and self._session.record.request.kind != UPDATE_KIND_DELTA:
            raise Reason.WEIGHTS_INCOMPLETE.error("nothing was written in this update")
        await self._session.ready()
        return self._session.levels(expected)

    async def _seal(self, run: Run, levels: Levels, expected: Expected) -> tuple[list[Slot], str]:
        """Complete and verify the shadow copies while generation goes on: the targets that are PREPARED, and the digest
        that they all have, or "". What fails here has touched nothing that is served.
        """
        session = self._session
        results = await session.step(SealUpdateRequest(), session.targets)
        sealed = [slot for slot, r in zip(session.targets, results, strict=True) if r.outcome == OUTCOME_APPLIED]
        answers = [result for result in results if result.outcome == OUTCOME_APPLIED]
        verdict = await verify(session, sealed, answers, levels, expected)
        wrong = verdict.wrong
        for result in results:
            if result.slot in wrong:
                if result.slot in verdict.checks:
                    _replace_ranks(result, verdict.checks[result.slot])
                result.outcome = OUTCOME_REJECTED
                result.error.CopyFrom(wrong[result.slot].detail())
            if result.outcome != OUTCOME_APPLIED:
                run.add(result)
        return [slot for slot in sealed if slot.name not in wrong], verdict.digest

    async def _stop(self, run: Run, slots: Sequence[Slot]) -> list[Slot]:
        """Pause targets before what serves is touched: those that are."""
        paused = await self._session.pause(slots)
        return self._keep(run, slots, [result for result in paused if result.outcome != OUTCOME_APPLIED])

    async def _complete(
        self, run: Run, slots: Sequence[Slot], levels: Levels, expected: Expected
    ) -> tuple[list[Slot], str]:
        """Finish targets, flush, verify: those that confirmed, and the digest that they all have, or ""."""
        session = self._session
        options = session.record.request.options
        commit = CommitUpdateRequest(version=session.record.plan.version, adapters=options.adapters)
        # A flush where the commit has failed costs entries that could have been kept, and nothing else.
        committed, *flushed = await session.in_order(session.step(commit, slots), *self._flushing(slots))
        good = await self._flushed(run, self._keep(run, slots, committed), flushed)
        answers = [result for result in committed if result.outcome == OUTCOME_APPLIED]
        digest = ""
        if session.staged:
            wrong = verification_levels.judge_evidence(answers, levels, probed=options.HasField("probe"))
            session.timeline.fail(wrong, levels)
            values = await compute(session, good)
            self._decode |= values.decode
            good = await self._without(run, good, wrong | values.wrong)
        else:
            good, digest = await self._verify(run, good, answers, levels, expected)
        self._certify(run, good, levels)
        return good, digest

    @contextlib.asynccontextmanager
    async def _silencing(self, good: Sequence[Slot]) -> AsyncIterator[None]:
        """A stage of the model that is not among those that confirmed could go on serving the old version: inside,
        none does.
        """
        model = self._session.model
        others = [s for s in self._roster.slots.values() if s.model == model.record.name and s not in good]
        try:
            async with self._roster.leaving(others):
                await self._peers.silence(model, good)
            yield
        finally:
            self._peers.speak(model)

    def _at_admitted(self) -> list[Slot]:
        """Stages that say that they are at a version which may be served beside the one that is being published. Of the
        others one may still serve what was served beside it earlier, under a coordinator before this one.
        """
        model = self._session.model
        slots = [slot for slot in self._roster.slots.values() if slot.model == model.record.name]
        return [slot for slot in slots if slot.report is not None and slot.report.weight_version in model.admitted]

    def _present(self, run: Run, slots: Sequence[Slot]) -> list[Slot]:
        """Those that are still filled by what has confirmed. One that was restarted since has other weights."""
        gone = [slot for slot in slots if self._roster.slots.get(slot.name) is not slot]
        error = Reason.INCARNATION_FENCED.error("it was restarted after it had confirmed", outcome=OUTCOME_UNKNOWN)
        self._spoil(run, {slot.name: error for slot in gone})
        return [slot for slot in slots if slot not in gone]

    def _left_out(self) -> bool:
        """Whether a stage that is there was left out because it could not take this update."""
        return any(excluded.state not in ABSENT for excluded in self._session.record.plan.excluded)

    def _keep(self, run: Run, slots: Sequence[Slot], results: Sequence[StageResult]) -> list[Slot]:
        """File results; the slots of which none failed."""
        for result in results:
            run.add(result)
        failed = {result.slot for result in results if result.outcome != OUTCOME_APPLIED}
        return [slot for slot in slots if slot.name not in failed]

    def _flushing(self, slots: Sequence[Slot]) -> list[Coroutine[Any, Any, list[StageResult]]]:
        """The steps that leave no KV entry of the old weights."""
        options = self._session.record.request.options
        if options.HasField("flush_cache") and not options.flush_cache:
            return []
        steps = []
        frozen = [
            slot for slot in slots if PAUSE_MODE_IN_PLACE in (options.pause, slot.report and slot.report.pause_mode)
        ]
        if frozen:
            # Their requests would go on with KV entries of the old weights, which nobody asked for: recompute them.
            steps.append(self._session.step(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT), frozen))
        steps.append(self._session.step(FlushCacheRequest(), [slot for slot in slots if _has_cache(slot)]))
        return steps

    async def _flushed(self, run: Run, slots: list[Slot], results: Sequence[Sequence[StageResult]]) -> list[Slot]:
        """Those that have done all of :meth:`_flushing`. The state of the others, whose commit went well, does not say
        that they may not serve.
        """
        flat = [result for step in results for result in step]
        failed = {r.slot: from_detail(r.error) for r in flat if r.outcome != OUTCOME_APPLIED}
        return await self._without(run, slots, {slot.name: failed[slot.name] for slot in slots if slot.name in failed})

    async def _verify(
        self, run: Run, slots: list[Slot], committed: Sequence[StageResult], levels: Levels, expected: Expected
    ) -> tuple[list[Slot], str]:
        verdict = await verify(self._session, slots, committed, levels, expected)
        self._decode |= verdict.decode
        good = await self._without(run, slots, verdict.wrong)
        for result in run.operation.stage_results:
            if result.slot in verdict.checks:
                _replace_ranks(result, verdict.checks[result.slot])
        return good, verdict.digest

    async def _without(self, run: Run, slots: list[Slot], wrong: Mapping[str, RlctlError]) -> list[Slot]:
        """Those that are not wrong; the others are quarantined, and their results say why."""
        self._spoil(run, wrong)
        await self._roster.quarantine({slot: wrong[slot.name].detail() for slot in slots if slot.name in wrong})
        return [slot for slot in slots if slot.name not in wrong]

    def _certify(self, run: Run, slots: Sequence[Slot], levels: Levels) -> None:
        """Say in the results of targets that have confirmed how far they were verified."""
        names = {slot.name for slot in slots}
        for result in run.operation.stage_results:
            if result.outcome == OUTCOME_APPLIED and result.slot in names:
                self._certify_one(result, levels[result.slot])

    def _certify_one(self, result: StageResult, level: Level) -> None:
        probed = self._session.record.request.options.HasField("probe")
        decode = result.slot in self._decode
        result.verification.CopyFrom(verification_levels.certificate(level, probed=probed, decode=decode))
        result.verified = max(result.verification.held, result.verification.computed)
        if level == VERIFICATION_LEVEL_EXPECTED:
            result.evidence = EVIDENCE_VERIFIED
            for rank in result.rank_results:
                rank.evidence = EVIDENCE_VERIFIED

    def _evidence(self, run: Run) -> common_pb2.Verification:
        """The weakest, of each kind, among the targets that have confirmed."""
        return verification_levels.weakest(
            [
                result.verification
                for result in run.operation.stage_results
                if result.outcome == OUTCOME_APPLIED and result.HasField("verification")
            ]
        )

    def _spoil(self, run: Run, errors: Mapping[str, RlctlError]) -> None:
        """Targets that had committed and turned out wrong: their results say so."""
        for result in list(run.operation.stage_results):
            error = errors.get(result.slot)
            if error is not None:
                changed = StageResult()
                changed.CopyFrom(result)
                changed.outcome = max(error.outcome, OUTCOME_DIRTY)
                changed.error.CopyFrom(error.detail())
                run.add(changed)

    def _cause(self, run: Run) -> str:
        for result in run.operation.stage_results:
            if result.outcome != OUTCOME_APPLIED:
                return f"{result.slot}: {result.error.message}"
        return ""

    async def _publish(
        self, run: Run, good: Sequence[Slot], digest: str, beside: Sequence[common_pb2.WeightVersion] = ()
    ) -> None:
        """Publish the version, once, and trust these targets again. ``beside``: versions that may be served as well."""
        session = self._session
        trusted = good if session.full else []
        evidence = self._evidence(run)
        run.operation.verification.CopyFrom(evidence)
        if session.published:
            await self._roster.lift_quarantine(trusted)
            await self._weaken(evidence)
            return
        version = session.record.plan.version
        dropped: list[str] = []
        async with self._roster.publishing:
            record = versions.published(
                session.model,
                version,
                model_digest=digest,
                digest_key=session.record.plan.digest_key,
                checkpoint=session.checkpoint,
                verification=evidence,
                now=self._clock.wall(),
            )
            if session.record.request.options.adapters == ADAPTER_POLICY_DROP:
                dropped = [adapter.name for adapter in record.adapters]
                del record.adapters[:]

            async def write(released: Sequence[Put]) -> None:
                await session.advance(UPDATE_PHASE_PUBLISHED, model_put(record), *released)

            await self._roster.lift_quarantine(trusted, write)
            versions.publish(session.model, record, beside)
        session.model.fingerprints = self._fingerprints
        self._roster.changed()
        run.operation.weight_version.CopyFrom(version)
        run.operation.model_digest = digest
        run.operation.adapters.extend(record.adapters)
        run.operation.dropped_adapters.extend(dropped)

    async def _weaken(self, evidence: common_pb2.Verification) -> None:
        """Journal the version's evidence anew where a later batch has less of it than the batches before."""
        model = self._session.model
        if not evidence.held or evidence == model.record.verification:
            return
        async with self._roster.publishing:
            record = versions.verified(model, evidence)
            await self._session.advance(UPDATE_PHASE_PUBLISHED, model_put(record))
            model.record = record
        self._roster.changed()

    async def _await_admission(self, good: Sequence[Slot]) -> None:
        """Wait until the stages say that they have been admitted: whoever reads the fleet next sees it.

        One that does not say so in time has not got the grant; the next one will reach it, and till then it is
        UPDATING and serves nothing.
        """
        with self._session.timeline.phase(PHASE_KIND_ADMIT), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADMISSION_S):
                await self._roster.until(lambda: all(slot.report is None or not slot.report.update_id for slot in good))

    async def _resume_after(self, run: Run, good: Sequence[Slot]) -> None:
        """What was not done is a warning at its target, which nothing is routed to: it could generate, or not, against
        what its trainer was told.
        """
        if self._session.record.request.options.after == AFTER_UPDATE_STAY_PAUSED:
            results = await self._session.hand_over_pause(good)
        else:
            slots = [slot for slot in good if slot.name in self._session.resume]
            results = await self._session.go_on(slots)
        failed = {result.slot: result.error for result in results if result.outcome != OUTCOME_APPLIED}
        self._warn(run, failed)
        await self._roster.quarantine({slot: failed[slot.name] for slot in good if slot.name in failed})

    @staticmethod
    def _warn(run: Run, failed: Mapping[str, ErrorDetail]) -> None:
        """Say at targets what of the end failed."""
        for target in run.operation.stage_results:
            if target.slot in failed and not target.HasField("warning"):
                target.warning.CopyFrom(failed[target.slot])

    def _stamp(self, run: Run) -> None:
        if self._paused_s:
            run.operation.pause_time.CopyFrom(duration(self._paused_s))
        for result in run.operation.stage_results:
            slot = self._roster.slots.get(result.slot)  # it may have left the fleet since
            if result.outcome == OUTCOME_APPLIED and slot is not None and slot.report is not None:
                result.state = slot.report.state
                result.weight_version.CopyFrom(self._session.record.plan.version)


def _has_cache(slot: Slot) -> bool:
    """Whether a stage may hold KV entries."""
    report = slot.report
    return report is not None and (report.cache_in_doubt or common_pb2.MEMORY_TAG_KV_CACHE not in report.released)


def _replace_ranks(result: StageResult, answer: StageResult) -> None:
    """Let a target's result say what each of its ranks holds of the tensor that differs."""
    del result.rank_results[:]
    result.rank_results.extend(answer.rank_results)
