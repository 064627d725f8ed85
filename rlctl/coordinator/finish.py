"""The end of an update: finish at every target, flush, verify, publish, admit, resume.

Nothing of a version is served before it is published; after that the update is finished, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from rlctl.coordinator import verification, versions
from rlctl.coordinator.operations import Run, conclude
from rlctl.coordinator.peers import Peers
from rlctl.coordinator.roster import ABSENT, Roster, Slot, model_put
from rlctl.coordinator.session import Session
from rlctl.errors import Reason, RlctlError, from_detail
from rlctl.ports import Clock, Put
from rlctl.times import duration
from rlctl.v1 import common_pb2
from rlctl.v1.common_pb2 import (
    EVIDENCE_VERIFIED,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_UNKNOWN,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_NONE,
)
from rlctl.v1.journal_pb2 import UPDATE_PHASE_COMMITTING, UPDATE_PHASE_PUBLISHED
from rlctl.v1.results_pb2 import OPERATION_STATE_PARTIAL, StageResult
from rlctl.v1.verbs_pb2 import (
    AFTER_UPDATE_STAY_PAUSED,
    AbortUpdateRequest,
    CheckWeightsRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    FlushCacheRequest,
    PauseGenerationRequest,
)

log = logging.getLogger(__name__)

ADMISSION_S = 10.0
"""Time that a grant may take to a stage and its report back."""


class Finish:
    """Finishes one update whose targets have been written into."""

    def __init__(self, session: Session, roster: Roster, peers: Peers, clock: Clock) -> None:
        self._session = session
        self._roster = roster
        self._peers = peers
        self._clock = clock

    async def commit(self, run: Run, expected_digest: str) -> None:
        """Complete, flush, verify, publish, admit, resume. Raises when the version was not published."""
        good, digest = await self._complete(run, expected_digest)
        async with self._silencing(good):
            good = self._present(run, good)
            bad = [slot for slot in self._session.frozen if slot not in good]
            if len(good) < self._session.quorum:
                raise self._session.short_of_quorum(len(good), self._cause(run))
            await self._session.step(AbortUpdateRequest(reason="did not confirm"), bad, cleanup=True)
            await self._publish(run, good, digest)
        try:
            await self._await_admission(good)
            await self._resume_after(run, good)
        except RlctlError as error:
            log.warning("%s is published, but what follows failed: %s", run.operation.weight_version.label, error)
        self._stamp(run)
        whole = len(self._present(run, good)) == len(self._session.frozen)
        conclude(run.operation, update=True)
        if not whole or self._left_out() or any(r.HasField("warning") for r in run.operation.stage_results):
            # What became of the others may be unknown, but they are quarantined, and the version is published.
            run.operation.state = OPERATION_STATE_PARTIAL

    async def restore(self, run: Run, expected_digest: str) -> None:
        """Complete, flush, verify, admit, resume, for targets that are brought to a version that is published already.

        Raises when one did not confirm.
        """
        good, _ = await self._complete(run, expected_digest)
        if len(good) < len(self._session.frozen):
            raise self._session.short_of_quorum(len(good), self._cause(run))
        await self._roster.lift_quarantine(good)
        for slot in good:
            slot.restoring = False
            self._peers.grant(slot)
        await self._await_admission(good)
        await self._resume_after(run, good)
        self._stamp(run)

    async def _complete(self, run: Run, expected_digest: str) -> tuple[list[Slot], str]:
        """Finish, flush and verify the targets: those that confirmed, and the digest that they all have, or ""."""
        if not self._session.written:
            raise Reason.WEIGHTS_INCOMPLETE.error("nothing was written in this update")
        await self._session.ready()
        await self._session.advance(UPDATE_PHASE_COMMITTING)
        levels = self._session.levels(expected_digest)
        good = self._keep(
            run,
            await self._session.step(
                CommitUpdateRequest(version=self._session.record.plan.version), self._session.targets
            ),
        )
        good = await self._flush(run, good)
        return await self._verify(run, good, levels, expected_digest)

    @contextlib.asynccontextmanager
    async def _silencing(self, good: Sequence[Slot]) -> AsyncIterator[None]:
        """A stage of the model that is not among those that confirmed could go on serving the old version: inside,
        none does.
        """
        try:
            await self._peers.silence(self._session.model, good)
            yield
        finally:
            self._peers.speak(self._session.model)

    def _present(self, run: Run, slots: Sequence[Slot]) -> list[Slot]:
        """Those that are still filled by what has confirmed. One that was restarted since has other weights."""
        gone = [slot for slot in slots if self._roster.slots.get(slot.name) is not slot]
        error = Reason.INCARNATION_FENCED.error("it was restarted after it had confirmed", outcome=OUTCOME_UNKNOWN)
        self._spoil(run, {slot.name: error for slot in gone})
        return [slot for slot in slots if slot not in gone]

    def _left_out(self) -> bool:
        """Whether a stage that is there was left out because it could not take this update."""
        return any(excluded.state not in ABSENT for excluded in self._session.record.plan.excluded)

    def _keep(self, run: Run, results: Sequence[StageResult]) -> list[Slot]:
        for result in results:
            run.add(result)
        return [slot for slot, r in zip(self._session.targets, results, strict=True) if r.outcome == OUTCOME_APPLIED]

    async def _flush(self, run: Run, slots: list[Slot]) -> list[Slot]:
        options = self._session.record.request.options
        if options.HasField("flush_cache") and not options.flush_cache:
            return slots
        results: list[StageResult] = []
        if options.pause == PAUSE_MODE_IN_PLACE:
            # Frozen requests would go on with KV entries of the old weights, which nobody asked for: recompute them.
            results += await self._session.step(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT), slots)
        awake = [slot for slot in slots if slot.name in self._awake()]
        results += await self._session.step(FlushCacheRequest(), awake)
        failed = {r.slot: from_detail(r.error) for r in results if r.outcome != OUTCOME_APPLIED}
        self._spoil(run, failed)
        return [slot for slot in slots if slot.name not in failed]

    def _awake(self) -> set[str]:
        """Targets with a KV cache to flush."""
        return {
            slot.name
            for slot in self._session.targets
            if slot.report is not None and common_pb2.MEMORY_TAG_KV_CACHE not in slot.report.released
        }

    async def _verify(
        self,
        run: Run,
        slots: list[Slot],
        levels: dict[str, common_pb2.VerificationLevel.ValueType],
        expected_digest: str,
    ) -> tuple[list[Slot], str]:
        # A single target at level NONE has nothing to compare with, but its ranks must still agree among themselves.
        wanted = self._session.record.request.options.verify
        checked = [] if wanted == VERIFICATION_LEVEL_NONE else [slot for slot in slots if verification.digests(slot)]
        results = await self._session.step(CheckWeightsRequest(), checked)
        wrong = verification.judge(results, levels, expected_digest)
        self._spoil(run, wrong)
        await self._roster.quarantine({slot: wrong[slot.name].detail() for slot in slots if slot.name in wrong})
        for result in run.operation.stage_results:
            if result.outcome == OUTCOME_APPLIED and result.slot in levels:
                result.verified = levels[result.slot]
                if levels[result.slot] == VERIFICATION_LEVEL_EXPECTED:
                    result.evidence = EVIDENCE_VERIFIED
                    for rank in result.rank_results:
                        rank.evidence = EVIDENCE_VERIFIED
        digests = {r.rank_results[0].check.model_digest for r in results if r.slot not in wrong and r.rank_results}
        return [slot for slot in slots if slot.name not in wrong], digests.pop() if len(digests) == 1 else ""

    def _spoil(self, run: Run, errors: dict[str, RlctlError]) -> None:
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

    async def _publish(self, run: Run, good: Sequence[Slot], digest: str) -> None:
        version = self._session.record.plan.version
        record = versions.published(
            self._session.model, version, model_digest=digest, checkpoint=self._session.checkpoint
        )

        async def write(released: Sequence[Put]) -> None:
            await self._session.advance(UPDATE_PHASE_PUBLISHED, model_put(record), *released)

        await self._roster.lift_quarantine(good if self._session.full else [], write)
        versions.publish(self._session.model, record)
        for slot in self._roster.slots.values():
            slot.late = slot.late or (slot.model == record.name and slot not in good)
        self._roster.changed()
        run.operation.weight_version.CopyFrom(version)
        run.operation.model_digest = digest

    async def _await_admission(self, good: Sequence[Slot]) -> None:
        """Wait until the stages say that they have been admitted: whoever reads the fleet next sees it.

        One that does not say so in time has not got the grant; the next one will reach it, and till then it is
        UPDATING and serves nothing.
        """
        with contextlib.suppress(TimeoutError):
            async with (
                asyncio.timeout(ADMISSION_S),
                contextlib.aclosing(self._roster.watch(self._session.model.record.name)) as events,
            ):
                async for _ in events:
                    if all(slot.report is None or not slot.report.update_id for slot in good):
                        return

    async def _resume_after(self, run: Run, good: Sequence[Slot]) -> None:
        if self._session.record.request.options.after == AFTER_UPDATE_STAY_PAUSED:
            await self._session.hand_over_pause(good)
            return
        slots = [slot for slot in good if slot.name in self._session.resume]
        results = await self._session.step(ContinueGenerationRequest(), slots, cleanup=True)
        answers = zip(slots, results, strict=True)
        failed = {slot: result.error for slot, result in answers if result.outcome != OUTCOME_APPLIED}
        await self._roster.quarantine(failed)
        warnings = {slot.name: error for slot, error in failed.items()}
        for target in run.operation.stage_results:
            if target.slot in warnings:
                target.warning.CopyFrom(warnings[target.slot])

    def _stamp(self, run: Run) -> None:
        if self._session.paused_at is not None:
            paused = self._clock.now() - self._session.paused_at
            run.operation.pause_time.CopyFrom(duration(paused))
        for result in run.operation.stage_results:
            report = self._roster.slots[result.slot].report
            if result.outcome == OUTCOME_APPLIED and report is not None:
                result.state = report.state
                result.weight_version.CopyFrom(self._session.record.plan.version)
