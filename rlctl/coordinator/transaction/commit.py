"""The end of an update: retract, complete at every target, flush, verify, publish, admit, resume.

No stage serves a version before the publish. After the publish the update always finishes, except at a restart of the
coordinator, which ends the operation UNKNOWN and keeps the version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError, from_detail, typed
from rlctl.coordinator.fleet import disruptions, versions
from rlctl.coordinator.fleet.model_state import model_put
from rlctl.coordinator.fleet.roster import ABSENT
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.update import Update
from rlctl.coordinator.transaction.verification import compute, verify
from rlctl.coordinator.transaction.verification_levels import Expected, Level
from rlctl.ports import Put
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
"""Verification level of each target, by slot."""

ADMISSION_S = 10.0
"""Longest wait for a grant to reach a stage and for the stage's next report."""


NOT_CONFIRMED = "did not confirm"


class Commit:
    """Finishes an update with written targets."""

    def __init__(self, update: Update, context: Context) -> None:
        self._update = update
        self._run = update.run
        self._roster = context.roster
        self._peers = context.peers
        self._clock = context.clock
        self._paused_s = 0.0
        self._fingerprints = b""
        self._decode: frozenset[str] = frozenset()  # slots that passed the decode check

    async def commit(self, expected: Expected) -> None:
        """Complete, flush, verify, publish, admit, resume, batch by batch. Raises if the version is not published.

        Shadow copies are complete and verified before the first pause. An in-place update is a single batch.
        """
        update = self._update
        levels = await self._written(expected)
        waiting, digest = list(update.targets), ""
        if update.staged:
            waiting, digest = await self._seal(levels, expected)
            self._refuse_short(len(waiting))
            await update.check_journal()
        try:
            while waiting:
                size = self._batch_size(waiting)
                batch, waiting = waiting[:size], waiting[size:]
                with disruptions.batch(update.model, batch):
                    waiting = await self._roll(batch, waiting, levels, expected, digest)
                update.timeline.turn()
        except Exception as error:
            if not update.published:
                raise
            await self.break_off(error)
        else:
            self._conclude()

    def _batch_size(self, waiting: Sequence[Slot]) -> int:
        most = self._update.record.request.rollout.max_unavailable
        return disruptions.batch_size(self._roster, self._update.model, most) if most else len(waiting)

    async def commit_batch(self, expected: Expected) -> None:
        """Complete, flush, verify, publish, admit and resume the present batch of a rolling in-place update.

        The last batch finishes the update. Raises if the version is not published, or the failure that ends the
        rolling.
        """
        update = self._update
        levels = await self._written(expected)
        update.waiting = await self._roll(update.targets, update.waiting, levels, expected, "")
        if not update.waiting:
            self._conclude()

    async def break_off(self, error: Exception) -> None:
        """End a rolling update after the batches that serve the version. The other stages become STALE or DIRTY.

        A defect ends the update too, since otherwise the previous version would remain in service.
        """
        update = self._update
        self._log_unfinished(error)
        try:
            await self._close(update.model.record.model_digest, typed(error))
        except RlctlError as again:
            self._log_unfinished(again)
            # The end at these targets is not recorded. APPLIED for a read of the weights says nothing about the commit.
            done = {slot.name for slot in update.done}
            read = [
                r.slot for r in self._run.operation.stage_results if r.outcome == OUTCOME_APPLIED and r.slot not in done
            ]
            for slot in read:
                self._run.add(StageResult(slot=slot, outcome=OUTCOME_UNKNOWN, error=again.detail()))
        self._conclude(typed(error))
        if self._run.operation.state == OPERATION_STATE_OK:
            self._run.operation.state = OPERATION_STATE_PARTIAL
            self._run.operation.error.CopyFrom(typed(error).detail())

    def _conclude(self, cause: RlctlError | None = None) -> None:
        """``cause``: failure that ended the update early. Targets without a result get it as their error."""
        self._stamp()
        complete = len(self._present(self._update.done)) == len(self._update.frozen)
        self._run.conclude(update=True, cause=cause)
        if not complete or self._left_out() or any(r.HasField("warning") for r in self._run.operation.stage_results):
            # Other targets may be UNKNOWN and quarantined. The version is published all the same.
            self._run.operation.state = OPERATION_STATE_PARTIAL

    async def _roll(
        self,
        batch: Sequence[Slot],
        waiting: list[Slot],
        levels: Levels,
        expected: Expected,
        digest: str,
    ) -> list[Slot]:
        """Bring a batch (all targets, unless the update rolls) to the version. Returns the remaining targets.

        The first batch that serves the version publishes it. A later failure only ends the rolling.
        """
        update = self._update
        slots = await self._stop(batch) if update.staged else batch
        withheld: list[Slot] = []
        if update.published:
            withheld = [slot for slot in slots if not slot.record.HasField("quarantine")]
            await self._peers.hold_back(withheld, "its batch of a rolling update is not verified yet")
        confirmed, batch_digest = await self._complete(slots, levels, expected)
        update.done += confirmed
        failed = [slot for slot in batch if slot not in confirmed]
        for slot in batch:
            slot.restoring = slot in failed
        await self._roster.lift_quarantine([slot for slot in withheld if slot in confirmed])
        if waiting:
            await update.step(AbortUpdateRequest(reason=NOT_CONFIRMED), failed, cleanup=True)
        if len(update.done) + len(waiting) < update.quorum:
            if not update.published:
                self._refuse_short(len(update.done) + len(waiting))
            waiting = []  # do not repeat a failure at the remaining targets
        if waiting and not update.done:
            return waiting
        if waiting:
            with update.timeline.phase(PHASE_KIND_PUBLISH):
                async with self._silencing([*confirmed, *self._at_admitted()]):
                    await self._publish(confirmed, digest or batch_digest, beside=update.model.admitted)
        else:
            with update.timeline.phase(PHASE_KIND_PUBLISH):
                await self._close(digest or batch_digest)
        await self._serve(confirmed)
        return waiting

    async def _close(self, digest: str, error: RlctlError | None = None) -> None:
        """Publish the version as the only admitted version. Afterwards no stage of the model serves another version.

        ``error``: result for targets that the update has not reached.
        """
        update = self._update
        if update.published:  # no grant includes the previous version again, also after a failure below
            versions.close(update.model)
        async with self._silencing(update.done):
            confirmed = self._present(update.done)
            if not update.published:
                self._refuse_short(len(confirmed))
            unconfirmed = [slot for slot in update.frozen if slot not in confirmed]
            stopped = error or Reason.CANCELLED.error("the update ended before the commit of this target")
            # APPLIED for a read of the weights says nothing about the commit.
            failed_slots = {
                result.slot for result in self._run.operation.stage_results if result.outcome != OUTCOME_APPLIED
            }
            filed = failed_slots - update.missed
            for result in await update.step(AbortUpdateRequest(reason=NOT_CONFIRMED), unconfirmed, cleanup=True):
                if result.slot not in filed:
                    update.file(result, stopped)
            try:
                await self._publish(confirmed, digest)
            finally:
                if update.published and update.adapter is None:
                    for slot in self._roster.slots.values():
                        slot.late = slot.late or (slot.model == update.model.record.name and slot not in confirmed)

    async def _serve(self, good: Sequence[Slot]) -> None:
        """Wait until targets with the published version are admitted, then continue generation."""
        try:
            await self._await_admission(good)
            await self._resume_after(good)
        except RlctlError as error:
            self._log_unfinished(error)
            self._warn(dict.fromkeys((slot.name for slot in good), error.detail()))
        if self._update.paused_at is not None:
            self._paused_s = max(self._paused_s, self._clock.now() - self._update.paused_at)

    def _log_unfinished(self, error: Exception) -> None:
        defect = None if isinstance(error, RlctlError) else error
        log.warning(
            "%s is published, but a later step of its commit failed: %s",
            self._run.operation.weight_version.label,
            error,
            exc_info=defect,
        )

    def _refuse_short(self, count: int) -> None:
        if count < self._update.quorum:
            raise self._update.short_of_quorum(count, self._cause())

    async def restore(self, expected: Expected) -> None:
        """Complete, flush, verify, admit and resume targets of a heal, at a version that is already published.

        Raises if a target does not confirm.
        """
        levels = await self._written(expected)
        confirmed, _ = await self._complete(self._update.targets, levels, expected)
        if len(confirmed) < len(self._update.frozen):
            raise self._update.short_of_quorum(len(confirmed), self._cause())
        await self._roster.lift_quarantine(confirmed)
        for slot in confirmed:
            slot.restoring = False
            self._peers.grant(slot)
        await self._serve(confirmed)
        self._stamp()

    async def _written(self, expected: Expected) -> Levels:
        """Return the verification levels, once all targets are written."""
        self._fingerprints = expected.fingerprints
        if not self._update.written:
            if self._update.record.request.kind != UPDATE_KIND_DELTA:
                raise Reason.WEIGHTS_INCOMPLETE.error("no tensor was written in this update")
            await self._update.check_journal()  # the delta is equal to its base
        await self._update.ready()
        return self._update.levels(expected)

    async def _seal(self, levels: Levels, expected: Expected) -> tuple[list[Slot], str]:
        """Complete and verify the shadow copies while engines generate. A failure here leaves the served weights
        untouched.

        Returns the verified targets, and their common digest or "".
        """
        update = self._update
        results = await update.step(SealUpdateRequest(), update.targets)
        sealed = [slot for slot, r in zip(update.targets, results, strict=True) if r.outcome == OUTCOME_APPLIED]
        answers = [result for result in results if result.outcome == OUTCOME_APPLIED]
        verdict = await verify(update, sealed, answers, levels, expected)
        errors = verdict.wrong
        for result in results:
            if result.slot in errors:
                if result.slot in verdict.checks:
                    _replace_ranks(result, verdict.checks[result.slot])
                result.outcome = OUTCOME_REJECTED
                result.error.CopyFrom(errors[result.slot].detail())
            if result.outcome != OUTCOME_APPLIED:
                self._run.add(result)
        return [slot for slot in sealed if slot.name not in errors], verdict.digest

    async def _stop(self, slots: Sequence[Slot]) -> list[Slot]:
        """Pause targets before a change of the served weights. Returns the targets without a failure."""
        paused = await self._update.pause(slots)
        return self._keep(slots, [result for result in paused if result.outcome != OUTCOME_APPLIED])

    async def _complete(self, slots: Sequence[Slot], levels: Levels, expected: Expected) -> tuple[list[Slot], str]:
        """Retract, commit, flush and verify targets.

        Returns the targets that confirmed, and their common digest or "".
        """
        update = self._update
        options = update.record.request.options
        commit = CommitUpdateRequest(version=update.record.plan.version, adapters=options.adapters)
        # A retract or flush beside a failed commit costs KV entries, and nothing else.
        dropping, flushing = self._dropping(slots), self._flushing(slots)
        steps = await update.in_order(*dropping, update.step(commit, slots), *flushing)
        committed = steps.pop(len(dropping))
        confirmed = await self._flushed(self._keep(slots, committed), steps)
        answers = [result for result in committed if result.outcome == OUTCOME_APPLIED]
        digest = ""
        if update.staged:
            errors = verification_levels.judge_evidence(answers, levels, probed=options.HasField("probe"))
            update.timeline.fail(errors, levels)
            values = await compute(update, confirmed)
            self._decode |= values.decode
            confirmed = await self._without(confirmed, errors | values.wrong)
        else:
            confirmed, digest = await self._verify(confirmed, answers, levels, expected)
        self._certify(confirmed, levels)
        return confirmed, digest

    @contextlib.asynccontextmanager
    async def _silencing(self, good: Sequence[Slot]) -> AsyncIterator[None]:
        """Silence the other stages of the model. Otherwise a stage could continue to serve the old version."""
        model = self._update.model
        excluded_slots = [s for s in self._roster.slots.values() if s.model == model.record.name and s not in good]
        try:
            async with self._roster.leaving(excluded_slots):
                await self._peers.silence(model, good)
            yield
        finally:
            self._peers.speak(model)

    def _at_admitted(self) -> list[Slot]:
        """Return the stages that report an admitted version, which may be served beside the new version.

        Any other stage may still serve a version that a previous coordinator admitted.
        """
        model = self._update.model
        slots = [slot for slot in self._roster.slots.values() if slot.model == model.record.name]
        return [slot for slot in slots if slot.report is not None and slot.report.weight_version in model.admitted]

    def _present(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots whose process is the one that confirmed. A restarted stage has different weights."""
        replaced = [slot for slot in slots if self._roster.slots.get(slot.name) is not slot]
        error = Reason.INCARNATION_FENCED.error(
            "the stage was restarted after its confirmation", outcome=OUTCOME_UNKNOWN
        )
        self._spoil({slot.name: error for slot in replaced})
        return [slot for slot in slots if slot not in replaced]

    def _left_out(self) -> bool:
        """Whether the target set excludes a present stage that could not take this update."""
        return any(excluded.reason != ABSENT for excluded in self._update.record.plan.excluded)

    def _keep(self, slots: Sequence[Slot], results: Sequence[StageResult]) -> list[Slot]:
        """Add results. Returns the slots without a failure."""
        for result in results:
            self._run.add(result)
        failed = {result.slot for result in results if result.outcome != OUTCOME_APPLIED}
        return [slot for slot in slots if slot.name not in failed]

    @property
    def _drops_entries(self) -> bool:
        """Whether the update drops all KV entries of the old weights."""
        options = self._update.record.request.options
        return options.flush_cache or not options.HasField("flush_cache")

    def _dropping(self, slots: Sequence[Slot]) -> list[Coroutine[Any, Any, list[StageResult]]]:
        """Return the step, if any, after which frozen requests are computed again, with KV entries of the new weights.

        It comes before the commit, because SGLang names a token in flight by the label at the retract.
        """
        pause = self._update.record.request.options.pause
        frozen = [slot for slot in slots if PAUSE_MODE_IN_PLACE in (pause, slot.report and slot.report.pause_mode)]
        if not (frozen and self._drops_entries):
            return []
        return [self._update.step(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT), frozen)]

    def _flushing(self, slots: Sequence[Slot]) -> list[Coroutine[Any, Any, list[StageResult]]]:
        """Return the step, if any, that drops the KV entries that no request uses."""
        if not self._drops_entries:
            return []
        return [self._update.step(FlushCacheRequest(), [slot for slot in slots if _has_cache(slot)])]

    async def _flushed(self, slots: list[Slot], results: Sequence[Sequence[StageResult]]) -> list[Slot]:
        """Return the slots that have dropped their KV entries, and quarantine the other slots. The state of a stage
        after a successful commit does not prevent service.
        """
        flat = [result for step in results for result in step]
        failed = {r.slot: from_detail(r.error) for r in flat if r.outcome != OUTCOME_APPLIED}
        return await self._without(slots, {slot.name: failed[slot.name] for slot in slots if slot.name in failed})

    async def _verify(
        self, slots: list[Slot], committed: Sequence[StageResult], levels: Levels, expected: Expected
    ) -> tuple[list[Slot], str]:
        verdict = await verify(self._update, slots, committed, levels, expected)
        self._decode |= verdict.decode
        confirmed = await self._without(slots, verdict.wrong)
        for result in self._run.operation.stage_results:
            if result.slot in verdict.checks:
                _replace_ranks(result, verdict.checks[result.slot])
        return confirmed, verdict.digest

    async def _without(self, slots: list[Slot], wrong: Mapping[str, RlctlError]) -> list[Slot]:
        """Return the slots that are not wrong. The wrong slots are quarantined, with the cause in their results."""
        self._spoil(wrong)
        await self._roster.quarantine({slot: wrong[slot.name].detail() for slot in slots if slot.name in wrong})
        return [slot for slot in slots if slot.name not in wrong]

    def _certify(self, slots: Sequence[Slot], levels: Levels) -> None:
        """Add the verification to the results of targets that have confirmed."""
        names = {slot.name for slot in slots}
        for result in self._run.operation.stage_results:
            if result.outcome == OUTCOME_APPLIED and result.slot in names:
                self._certify_one(result, levels[result.slot])

    def _certify_one(self, result: StageResult, level: Level) -> None:
        probed = self._update.record.request.options.HasField("probe")
        decode = result.slot in self._decode
        result.verification.CopyFrom(verification_levels.certificate(level, probed=probed, decode=decode))
        result.verified = max(result.verification.held, result.verification.computed)
        if level == VERIFICATION_LEVEL_EXPECTED:
            result.evidence = EVIDENCE_VERIFIED
            for rank in result.rank_results:
                rank.evidence = EVIDENCE_VERIFIED

    def _evidence(self) -> common_pb2.Verification:
        """Return the weakest verification, of each kind, among the targets that have confirmed."""
        return verification_levels.weakest(
            [
                result.verification
                for result in self._run.operation.stage_results
                if result.outcome == OUTCOME_APPLIED and result.HasField("verification")
            ]
        )

    def _spoil(self, errors: Mapping[str, RlctlError]) -> None:
        """Add errors to the results of committed targets that are wrong."""
        for result in list(self._run.operation.stage_results):
            error = errors.get(result.slot)
            if error is not None:
                changed = StageResult()
                changed.CopyFrom(result)
                changed.outcome = max(error.outcome, OUTCOME_DIRTY)
                changed.error.CopyFrom(error.detail())
                self._run.add(changed)

    def _cause(self) -> str:
        for result in self._run.operation.stage_results:
            if result.outcome != OUTCOME_APPLIED:
                return f"{result.slot}: {result.error.message}"
        return ""

    async def _publish(
        self, good: Sequence[Slot], digest: str, beside: Sequence[common_pb2.WeightVersion] = ()
    ) -> None:
        """Publish the version, once, and lift the quarantine of these targets after a full update.

        ``beside``: versions that remain admitted.
        """
        update = self._update
        trusted = good if update.full else []
        evidence = self._evidence()
        self._run.operation.verification.CopyFrom(evidence)
        if update.published:
            await self._roster.lift_quarantine(trusted)
            await self._weaken(evidence)
            return
        version = update.record.plan.version
        dropped: list[str] = []
        async with self._roster.publishing:
            record = versions.published(
                update.model,
                version,
                model_digest=digest,
                digest_key=update.record.plan.digest_key,
                checkpoint=update.checkpoint,
                verification=evidence,
                now=self._clock.wall(),
            )
            if update.record.request.options.adapters == ADAPTER_POLICY_DROP:
                dropped = [adapter.name for adapter in record.adapters]
                del record.adapters[:]

            async def write(released: Sequence[Put]) -> None:
                await update.record_published(model_put(record), *released)

            await self._roster.lift_quarantine(trusted, write)
            versions.publish(update.model, record, beside)
        update.model.fingerprints = self._fingerprints
        self._roster.changed()
        self._run.operation.weight_version.CopyFrom(version)
        self._run.operation.model_digest = digest
        self._run.operation.adapters.extend(record.adapters)
        self._run.operation.dropped_adapters.extend(dropped)

    async def _weaken(self, evidence: common_pb2.Verification) -> None:
        """Journal a weaker verification of the version, if a later batch reached less than the batches before."""
        model = self._update.model
        if not evidence.held or evidence == model.record.verification:
            return
        async with self._roster.publishing:
            record = versions.verified(model, evidence)
            await self._update.record_published(model_put(record))
            model.record = record
        self._roster.changed()

    async def _await_admission(self, good: Sequence[Slot]) -> None:
        """Wait until the stages report their admission, so that the fleet shows the admission after the update.

        A stage without such a report in time has not received the grant. The stage is UPDATING and serves nothing until
        the next grant.
        """
        with self._update.timeline.phase(PHASE_KIND_ADMIT), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADMISSION_S):
                await self._roster.until(lambda: all(slot.report is None or not slot.report.update_id for slot in good))

    async def _resume_after(self, good: Sequence[Slot]) -> None:
        """Continue generation, or hand over the pause. A failure becomes a warning and a quarantine of the target.

        Without the quarantine a target could generate, or not generate, contrary to the trainer's result.
        """
        if self._update.record.request.options.after == AFTER_UPDATE_STAY_PAUSED:
            results = await self._update.hand_over_pause(good)
        else:
            slots = [slot for slot in good if slot.name in self._update.resume]
            results = await self._update.go_on(slots)
        failed = {result.slot: result.error for result in results if result.outcome != OUTCOME_APPLIED}
        self._warn(failed)
        await self._roster.quarantine({slot: failed[slot.name] for slot in good if slot.name in failed})

    def _warn(self, failed: Mapping[str, ErrorDetail]) -> None:
        """Add warnings to the results of targets."""
        for target in self._run.operation.stage_results:
            if target.slot in failed and not target.HasField("warning"):
                target.warning.CopyFrom(failed[target.slot])

    def _stamp(self) -> None:
        if self._paused_s:
            self._run.operation.pause_time.CopyFrom(duration(self._paused_s))
        for result in self._run.operation.stage_results:
            slot = self._roster.slots.get(result.slot)  # None: deregistered since
            if result.outcome == OUTCOME_APPLIED and slot is not None and slot.report is not None:
                result.state = slot.report.state
                result.weight_version.CopyFrom(self._update.record.plan.version)


def _has_cache(slot: Slot) -> bool:
    """Whether a stage may have KV entries."""
    report = slot.report
    return report is not None and (report.cache_in_doubt or common_pb2.MEMORY_TAG_KV_CACHE not in report.released)


def _replace_ranks(result: StageResult, answer: StageResult) -> None:
    """Replace the rank results of a target by each rank's part of the tensor that differs."""
    del result.rank_results[:]
    result.rank_results.extend(answer.rank_results)
