"""Pauses and continues by name: the fleet's record of what is paused, and what its stages do, are changed together.

The record comes first (:mod:`.pauses`), so that a stage that comes meanwhile is paused, too. A pause that not every
target takes is taken back: the targets that it paused go on, and the operation has failed. Otherwise a fleet of which
one stage refused would stand still for the most part, with no caller who knows that it has to lift that. Stages that
were paused before stay paused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.coordinator.fanout import Fanout
from rlctl.coordinator.operations import Run
from rlctl.coordinator.peers import Peers
from rlctl.coordinator.roster import Roster, Slot
from rlctl.coordinator.versions import POSSIBLY_DONE
from rlctl.coordinator.waking import Waking
from rlctl.errors import Reason
from rlctl.outcomes import acknowledged
from rlctl.ports import Clock
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_SKIPPED, PAUSE_MODE_ABORT, Target
from rlctl.v1.fleet_pb2 import Pause
from rlctl.v1.journal_pb2 import PauseRecord
from rlctl.v1.results_pb2 import ExcludedStage, StageResult
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest, PauseGenerationRequest

TAKE_BACK_S = 5.0
"""How long continuing may take, which comes after the deadline of the pause if that was used up."""

PAUSED_LATER = "not there; it is paused before it serves again"
"""Why a stage that is absent is no target of a pause, and what becomes of it."""


class Pausing:
    """Carries out both."""

    def __init__(self, roster: Roster, peers: Peers, fanout: Fanout, waking: Waking, clock: Clock) -> None:
        self._roster = roster
        self._peers = peers
        self._fanout = fanout
        self._waking = waking
        self._clock = clock

    async def pause(self, request: PauseGenerationRequest, targets: Sequence[Slot], run: Run, deadline: float) -> None:
        """Pause all targets or, as far as they answer, none; the results are filed in ``run``.

        A stage of the request's target that is not there has stopped to serve when this returns, and is paused before
        it serves again.
        """
        target, operation_id = request.header.target, run.operation.operation_id
        # An update's pause whose update has ended is about to be lifted. A pause by name that is in force is not.
        generating = {
            slot.name
            for slot in targets
            if slot.report is not None and (not slot.report.paused or slot.held) and slot.pause is None
        }
        with _in_hand(targets):
            replaced = await self._roster.pauses.begin(
                PauseRecord(
                    target=target,
                    pause=Pause(
                        operation_id=operation_id,
                        mode=request.mode or PAUSE_MODE_ABORT,
                        since=run.operation.create_time,
                        by=request.by,
                        reason=request.reason,
                        until=_end(run.operation.create_time, request),
                    ),
                )
            )
            run.cancel = lambda: self._fanout.cancel(targets, operation_id, "1")
            # Lenient: a stage that is paused goes on, or is told to, whatever a full disk keeps off the record.
            results = await self._fanout.run(
                request,
                targets,
                operation_id=operation_id,
                step="1",
                deadline=deadline,
                on_result=run.add,
                lenient=True,
            )
            missing = next((result.slot for result in results if not acknowledged(result, update=False)), "")
            absent = "" if missing else await self._peers.generating(target, targets, deadline)
            if not missing and not absent:
                return
            await self._roster.pauses.take_back(operation_id, replaced)
            paused = {result.slot for result in results if result.outcome == OUTCOME_APPLIED} & generating
            again = [slot for slot in targets if slot.name in paused and slot.pause is None]
            await self._go_on_again(again, run, missing or absent)
        if absent:
            raise Reason.DEADLINE_EXCEEDED.error(f"{absent} could not be told, and its serving lease had not run out")

    async def _go_on_again(self, slots: Sequence[Slot], run: Run, because_of: str) -> None:
        continued = await self._fanout.run(
            ContinueGenerationRequest(),
            slots,
            operation_id=run.operation.operation_id,
            step="2",
            deadline=self._clock.now() + TAKE_BACK_S,
            lenient=True,
        )
        for result in continued:
            if result.outcome == OUTCOME_APPLIED:
                run.add(_taken_back(result, because_of))
            elif result.outcome in POSSIBLY_DONE:
                run.add(result)  # that it was paused says nothing of what it does now

    async def go_on(
        self, request: ContinueGenerationRequest, targets: Sequence[Slot], run: Run, deadline: float
    ) -> None:
        """Continue the targets. Pauses by name end for those that go on or will once their memory is back, and for
        stages of the request's target that are not there.
        """
        target = request.header.target
        with _in_hand(targets):
            await self._waking.go_on(request, targets, run, deadline)
            going = {r.slot for r in run.operation.stage_results if r.outcome in (OUTCOME_APPLIED, OUTCOME_SKIPPED)}
            refused = [slot.name for slot in targets if slot.name not in going]
            if going:
                await self._end(target, refused, told=targets)

    async def go_on_later(self, target: Target) -> None:
        """End the pauses of a target's stages, none of which can go on now: each goes on as soon as it can."""
        await self._end(target, (), told=())

    async def _end(self, target: Target, refused: Collection[str], told: Collection[Slot]) -> None:
        """End pauses. The same write records that the stages of the target that were not ``told`` go on later."""
        later = [slot for slot in self._roster.covered(target) if slot not in told and slot.pause is not None]
        every = list(self._roster.slots.values())
        await self._waking.remember(later, lambda puts: self._roster.pauses.end(target, every, refused, puts))


def _end(since: Timestamp, request: PauseGenerationRequest) -> Timestamp | None:
    """When a pause ends by itself."""
    if not request.HasField("ttl"):
        return None
    end = Timestamp()
    end.FromNanoseconds(since.ToNanoseconds() + request.ttl.ToNanoseconds())
    return end


def say_later(excluded: Sequence[ExcludedStage]) -> None:
    """Stages that are not there when a pause begins are told of it when they come."""
    for stage in excluded:
        stage.reason = PAUSED_LATER


@contextlib.contextmanager
def _in_hand(slots: Sequence[Slot]) -> Iterator[None]:
    for slot in slots:
        slot.in_hand += 1
    try:
        yield
    finally:
        for slot in slots:
            slot.in_hand -= 1


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
