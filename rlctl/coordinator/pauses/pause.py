"""Pauses and continues by name: change the fleet's record of pauses and its stages together.

The record comes first (:mod:`rlctl.coordinator.fleet.kept_pauses`), so that a stage that joins meanwhile is also
paused. A pause that a target does not confirm is taken back: the paused targets continue, and the operation
fails. Otherwise a refusal would leave most of the fleet paused, and no caller would know that a continue is
necessary. Stages that were paused before stay paused.

A pause of an adapter works alike. Paused adapters of a stage always follow the record: a stage that returns with an
adapter paused, without a pause on record, continues with that adapter (`orphans.py`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.outcomes import acknowledged, taken_back
from rlctl.coordinator.fleet.roster import ABSENT, Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.fleet.versions import POSSIBLY_DONE
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.fanout import continuing
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.pauses.continue_when_resident import Waking
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_SKIPPED, PAUSE_MODE_ABORT, Target
from rlctl.v1.fleet_pb2 import Pause
from rlctl.v1.journal_pb2 import PauseRecord
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest, PauseGenerationRequest

TAKE_BACK_S = 5.0
"""Time for the continue of a failed pause, after the pause's deadline."""

PAUSED_LATER = "absent; it is paused before it serves again"
"""Reason for which an absent stage is excluded from a pause."""


class Pausing:
    """Carries out pauses and continues by name."""

    def __init__(self, context: Context, waking: Waking) -> None:
        self._roster = context.roster
        self._peers = context.peers
        self._fanout = context.fanout
        self._clock = context.clock
        self._waking = waking

    async def pause(self, request: PauseGenerationRequest, targets: Sequence[Slot], run: Run, deadline: float) -> None:
        """Pause all targets or, as far as they answer, no target. The results are added to ``run``.

        On return, absent stages of the target have stopped serving. They are paused before they serve again. A target
        is REJECTED if a continue has ended the pause meanwhile.
        """
        target, operation_id, adapter = request.header.target, run.operation.operation_id, request.adapter
        generating = {slot.name for slot in targets if _generates(slot, adapter)}
        unpaused = [slot for slot in targets if not _is_kept(slot, adapter)]  # the other targets stay paused
        record = PauseRecord(
            target=target,
            pause=Pause(
                operation_id=operation_id,
                mode=request.mode or PAUSE_MODE_ABORT,
                since=run.operation.create_time,
                by=request.by,
                reason=request.reason,
                until=_end(run.operation.create_time, request),
                adapter=adapter,
            ),
        )
        with self._in_hand(targets, adapter), _undecided(unpaused, [operation_id]):
            try:
                await self._roster.pauses.begin(record)
            except RlctlError:
                _not_paused_later(run)
                raise
            # Lenient: a paused stage must continue again, even if a full disk prevents the record.
            results = await self._fanout.step(request, targets, run, deadline, lenient=True)
            missing = next((result.slot for result in results if not acknowledged(result, update=False)), "")
            absent = "" if missing else await self._generating(adapter, target, targets, deadline)
            if not missing and not absent:
                self._roster.pauses.confirm(operation_id)
                # A concurrent continue does not address a stage without a link, but ends the pause there.
                ended = {slot.name for slot in targets if not _is_kept(slot, adapter)}
                for result in results:
                    if result.slot in ended and result.outcome == OUTCOME_APPLIED:
                        run.add(taken_back(result, "a ContinueGeneration ended the pause while it ran"))
                return
            await self._roster.pauses.take_back(operation_id)
            _not_paused_later(run)
            paused = {result.slot for result in results if result.outcome == OUTCOME_APPLIED} & generating
            again = [slot for slot in targets if slot.name in paused and not _is_kept(slot, adapter)]
            await self._go_on_again(adapter, again, run, missing or absent)
        if absent:
            raise Reason.DEADLINE_EXCEEDED.error(
                f"{absent} was not paused: it has no link, and its serving lease has not ended"
            )

    async def _generating(self, adapter: str, target: Target, addressed: Collection[Slot], deadline: float) -> str:
        if adapter:
            return await self._peers.generating_with(adapter, target, addressed, deadline)
        return await self._peers.generating(target, addressed, deadline)

    async def _go_on_again(self, adapter: str, slots: Sequence[Slot], run: Run, because_of: str) -> None:
        continued = await self._fanout.run(
            ContinueGenerationRequest(adapter=adapter),
            slots,
            operation_id=run.operation.operation_id,
            step="2",
            deadline=self._clock.now() + TAKE_BACK_S,
            lenient=True,
        )
        for result in continued:
            if result.outcome == OUTCOME_APPLIED:
                run.add(taken_back(result, f"paused, then continued, because {because_of} did not pause"))
            elif result.outcome in POSSIBLY_DONE:
                run.add(result)  # the pause was confirmed, the present state is unknown
            else:
                cause = f"the pause was taken back, because {because_of} did not pause"
                run.add(taken_back(result, f"{cause}; the stage does not generate: {result.error.message}"))

    async def go_on(
        self, request: ContinueGenerationRequest, targets: Sequence[Slot], run: Run, deadline: float
    ) -> None:
        """Continue the targets, now or when memory is resumed. Pauses by name end there and for absent stages of the
        target. If every target refuses, no pause ends.
        """
        target, earlier = request.header.target, self._roster.pauses.besides((), "")
        with (
            self._in_hand(targets, ""),
            _undecided(targets, earlier),
            continuing(targets, ""),
            _reporting_kept(targets, "", run),
        ):
            await self._waking.go_on(request, targets, run, deadline)
            continued = {r.slot for r in run.operation.stage_results if r.outcome in (OUTCOME_APPLIED, OUTCOME_SKIPPED)}
            refused = [slot.name for slot in targets if slot.name not in continued]
            if continued:
                await self._end(target, refused, addressed=targets, newer=self._roster.pauses.besides(earlier, ""))

    async def go_on_with(
        self, request: ContinueGenerationRequest, targets: Sequence[Slot], run: Run, deadline: float
    ) -> None:
        """Continue an adapter at the targets, in any state. Pauses of the adapter end as in :meth:`go_on`.

        An absent stage continues on return.
        """
        adapter = request.adapter
        earlier = self._roster.pauses.besides((), adapter)
        with (
            self._in_hand(targets, adapter),
            _undecided(targets, earlier),
            continuing(targets, adapter),
            _reporting_kept(targets, adapter, run),
        ):
            results = await self._fanout.step(request, targets, run, deadline)
            refused = [r.slot for r in results if r.outcome not in (OUTCOME_APPLIED, OUTCOME_SKIPPED)]
            if len(refused) < len(targets):
                newer = self._roster.pauses.besides(earlier, adapter)
                await self.end_with(adapter, request.header.target, refused, newer)

    async def end_with(
        self, adapter: str, target: Target, refused: Collection[str] = (), newer: Collection[str] = ()
    ) -> None:
        """End pauses of an adapter. Stages with the adapter paused continue it as soon as possible."""
        all_slots = list(self._roster.slots.values())
        await self._roster.pauses.end(target, all_slots, refused, adapter=adapter, newer=newer)

    async def go_on_later(self, target: Target) -> None:
        """End the pauses of a target whose stages cannot continue now. The stages continue as soon as possible."""
        await self._end(target, (), addressed=())

    @contextlib.contextmanager
    def _in_hand(self, slots: Sequence[Slot], adapter: str) -> Iterator[None]:
        """Mark stages whose pause an operation decides. At the end, stages that owe a pause stop serving at once."""
        for slot in slots:
            slot.in_hand[adapter] += 1
        try:
            yield
        finally:
            for slot in slots:
                slot.in_hand[adapter] -= 1
                if slot.owes_pause or slot.owed_adapters:
                    self._peers.grant(slot, confirm=True)

    async def _end(
        self, target: Target, refused: Collection[str], addressed: Collection[Slot], newer: Collection[str] = ()
    ) -> None:
        """End pauses except ``newer``. The same write records that stages besides ``addressed`` continue later."""
        covered = [slot for slot in self._roster.covered(target) if slot not in addressed]
        later = [slot for slot in covered if slot.pause is not None and slot.pause.operation_id not in newer]
        all_slots = list(self._roster.slots.values())
        await self._waking.remember(
            later, lambda puts: self._roster.pauses.end(target, all_slots, refused, puts, newer=newer)
        )


def _generates(slot: Slot, adapter: str) -> bool:
    """Return whether a stage generates (with the adapter, if set), or would continue after a taken-back pause."""
    if slot.report is None or _is_kept(slot, adapter):
        return False
    if adapter:
        return True  # a stage with the adapter paused, but without a pause by name, is about to continue the adapter
    # The pause of an ended update is about to end, and so is a pause that waits for the stage's memory.
    return not slot.report.paused or slot.paused_by_update or slot.record.continue_when_resident


def _is_kept(slot: Slot, adapter: str) -> bool:
    """Whether a pause by name of an adapter, or of all requests, is in force for a stage."""
    return adapter in slot.adapter_pauses if adapter else slot.pause is not None


def _not_paused_later(run: Run) -> None:
    """Correct the absent stages of a pause that is not on record."""
    for stage in run.operation.excluded:
        if stage.reason == PAUSED_LATER:
            stage.reason = ABSENT


def _end(since: Timestamp, request: PauseGenerationRequest) -> Timestamp | None:
    """Return the time when a pause ends by the ttl, or None."""
    if not request.HasField("ttl"):
        return None
    end = Timestamp()
    end.FromNanoseconds(since.ToNanoseconds() + request.ttl.ToNanoseconds())
    return end


def refuse_unknown_adapter(roster: Roster, adapter: str, targets: Sequence[Slot]) -> None:
    """Raise ADAPTER_NOT_FOUND for an adapter that no target or its model has, and that no pause names."""
    models = sorted({slot.model for slot in targets})
    published = {entry.name for model in models for entry in roster.models[model].record.adapters}
    loaded = {entry.name for slot in targets if slot.report is not None for entry in slot.report.adapters}
    paused = {name for slot in targets for name in (*slot.adapter_pauses, *slot.paused_adapters)}
    if adapter not in published | loaded | paused:
        raise Reason.ADAPTER_NOT_FOUND.error(
            f"{', '.join(models)} has no adapter {adapter!r}; it has: {', '.join(sorted(published)) or 'none'}",
            field="adapter",
        )


@contextlib.contextmanager
def _reporting_kept(slots: Sequence[Slot], adapter: str, run: Run) -> Iterator[None]:
    """Take back the results of continued stages whose pause stays in force after a failure. They are paused again."""
    try:
        yield
    except RlctlError as error:
        paused_slots = {slot.name for slot in slots if _is_kept(slot, adapter)}
        for result in list(run.operation.stage_results):
            if result.slot in paused_slots and result.outcome == OUTCOME_APPLIED:
                run.add(taken_back(result, f"continued, then paused again, because the pause did not end: {error}"))
        raise


@contextlib.contextmanager
def _undecided(slots: Sequence[Slot], pauses: Collection[str]) -> Iterator[None]:
    """Mark the pauses that an operation puts in force, or may end, at stages."""
    for slot in slots:
        slot.undecided.update(pauses)
    try:
        yield
    finally:
        for slot in slots:
            slot.undecided.subtract(pauses)
            slot.undecided += Counter()  # drops zero counts
