"""A pause that not every target takes is taken back: whoever it paused goes on, and the operation has failed.

Otherwise a fleet of which one stage refused would stand still for the most part, with nobody who knows that it is to
lift that. Stages that somebody had paused before stay paused.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlctl.coordinator.fanout import Fanout
from rlctl.coordinator.operations import Run
from rlctl.coordinator.roster import Slot
from rlctl.coordinator.versions import POSSIBLY_DONE
from rlctl.errors import Reason
from rlctl.outcomes import acknowledged
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest, PauseGenerationRequest

TAKE_BACK_S = 5.0
"""How long continuing may take, which comes after the deadline of the pause if that was used up."""


async def pause(
    request: PauseGenerationRequest, targets: Sequence[Slot], run: Run, fanout: Fanout, clock: Clock, deadline: float
) -> None:
    """Pause all targets or, as far as they answer, none; the results are filed in ``run``."""
    # What an update paused that has ended is about to go on.
    generating = {slot.name for slot in targets if slot.report is not None and (not slot.report.paused or slot.held)}
    operation_id = run.operation.operation_id
    run.cancel = lambda: fanout.cancel(targets, operation_id, "1")
    # Lenient: who is paused goes on, or is said to, whatever a full disk keeps off the record meanwhile.
    results = await fanout.run(
        request, targets, operation_id=operation_id, step="1", deadline=deadline, on_result=run.add, lenient=True
    )
    missing = [result for result in results if not acknowledged(result, update=False)]
    paused = {result.slot for result in results if result.outcome == OUTCOME_APPLIED} & generating
    if not missing or not paused:
        return
    again = [slot for slot in targets if slot.name in paused]
    continued = await fanout.run(
        ContinueGenerationRequest(),
        again,
        operation_id=operation_id,
        step="2",
        deadline=clock.now() + TAKE_BACK_S,
        lenient=True,
    )
    for result in continued:
        if result.outcome == OUTCOME_APPLIED:
            run.add(_taken_back(result, missing[0].slot))
        elif result.outcome in POSSIBLY_DONE:
            run.add(result)  # that it was paused says nothing of what it does now


def _taken_back(result: StageResult, because_of: str) -> StageResult:
    undone = StageResult()
    undone.CopyFrom(result)
    why = Reason.CANCELLED.error(f"paused, then continued, because {because_of} did not pause").detail()
    undone.outcome = OUTCOME_REJECTED
    undone.error.CopyFrom(why)
    for rank in undone.rank_results:
        rank.outcome = OUTCOME_REJECTED
        rank.error.CopyFrom(why)
    return undone
