"""A continue of a stage that is ASLEEP: recorded in the journal, and done when the last memory region is resumed.

Co-located trainers continue an engine before its KV cache is resumed, as SGLang allows. slime's weight
update ends in a continue, and then slime resumes the KV cache. The engine must not continue earlier, because waiting
requests would use memory that is not allocated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.ports import Put
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_SKIPPED,
    STAGE_STATE_ASLEEP,
    STAGE_STATE_PAUSED,
    MemoryTag,
)
from rlctl.v1.journal_pb2 import SlotRecord
from rlctl.v1.results_pb2 import RankResult, StageResult
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest, ResumeMemoryRequest


class Waking:
    """Continues stages when memory is resumed, by a mark on the slot's record."""

    def __init__(self, context: Context) -> None:
        self._roster = context.roster
        self._fanout = context.fanout

    async def forget(self, targets: Sequence[Slot]) -> None:
        """Clear the mark of targets that have continued, or stay paused after the update."""
        await self._remember([slot for slot in targets if slot.record.continue_when_resident], False)

    async def go_on(
        self, request: ContinueGenerationRequest, targets: Sequence[Slot], run: Run, deadline: float
    ) -> None:
        """Continue the targets. With ``when_resident``, a stage that is ASLEEP with whole weights continues later."""
        later = [slot for slot in targets if request.when_resident and _may_wait(slot)]
        await self._remember(later, True)
        for slot in later:
            run.add(_later(slot))
        await self._carry_out(request, [slot for slot in targets if slot not in later], run, "1", deadline)

    async def resume(self, request: ResumeMemoryRequest, targets: Sequence[Slot], run: Run, deadline: float) -> None:
        """Resume regions, and continue the marked stages that are resident now."""
        results = await self._carry_out(request, targets, run, "1", deadline)
        paused = {r.slot for r in results if r.outcome == OUTCOME_APPLIED and r.state == STAGE_STATE_PAUSED}
        free = [slot for slot in targets if slot.name in paused and slot.pause is None]
        continued = [slot for slot in free if slot.record.continue_when_resident]
        if continued:
            memory = {result.slot: result for result in results}
            for result in await self._carry_out(ContinueGenerationRequest(), continued, run, "2", deadline):
                # A stage that did not answer has no results of ranks.
                for rank, before in zip(result.rank_results, memory[result.slot].rank_results, strict=False):
                    rank.memory.CopyFrom(before.memory)
                if result.outcome != OUTCOME_APPLIED:
                    cause = f"memory was resumed; the stage did not continue generation: {result.error.message}"
                    result.error.message = cause
                run.add(result)

    async def _carry_out(
        self,
        request: ContinueGenerationRequest | ResumeMemoryRequest,
        targets: Sequence[Slot],
        run: Run,
        step: str,
        deadline: float,
    ) -> Sequence[StageResult]:
        results = await self._fanout.step(request, targets, run, deadline, step=step)
        if isinstance(request, ContinueGenerationRequest):
            done = {result.slot for result in results if result.outcome == OUTCOME_APPLIED}
            await self.forget([slot for slot in targets if slot.name in done])
        return results

    async def remember(
        self, slots: Sequence[Slot], write: Callable[[Sequence[Put]], Awaitable[None]] | None = None
    ) -> None:
        """Record that stages continue as soon as they can, unless a pause by name is in force.

        ``write``: as for :meth:`Roster.change`.
        """
        await self._remember(slots, True, write)

    async def _remember(
        self,
        slots: Sequence[Slot],
        later: bool,
        write: Callable[[Sequence[Put]], Awaitable[None]] | None = None,
    ) -> None:
        def set_(record: SlotRecord) -> None:
            record.continue_when_resident = later

        if slots or write is not None:
            await self._roster.change(slots, set_, write)


def _may_wait(slot: Slot) -> bool:
    """Whether released memory is all that keeps a stage from continuing."""
    # Weights with lost content have no version.
    return slot.state == STAGE_STATE_ASLEEP and slot.report is not None and slot.report.weight_version.sequence > 0


def _later(slot: Slot) -> StageResult:
    assert slot.report is not None
    names = ", ".join(MemoryTag.Name(tag).removeprefix("MEMORY_TAG_").lower() for tag in slot.report.released)
    cause = Reason.MEMORY_RELEASED.error(f"released: {names}; the stage continues when the memory is resumed").detail()
    return StageResult(
        slot=slot.name,
        incarnation=slot.record.incarnation,
        outcome=OUTCOME_SKIPPED,
        state=slot.state,
        weight_version=slot.report.weight_version,
        error=cause,
        rank_results=[RankResult(coordinates=worker, outcome=OUTCOME_SKIPPED, error=cause) for worker in slot.workers],
    )
