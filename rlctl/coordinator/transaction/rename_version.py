"""Relabels the published version. Weights and sequence stay.

For clients that name the version only after their update. A stage with the version adopts the new label in the same
grant that admits it. So no stage stops serving.
"""

from __future__ import annotations

import asyncio
import contextlib

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet import versions
from rlctl.coordinator.fleet.model_state import model_put
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.transaction.planner import in_progress
from rlctl.v1.common_pb2 import (
    EVIDENCE_ENGINE,
    OUTCOME_APPLIED,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    STAGE_STATE_DIRTY,
    Target,
    WeightVersion,
)
from rlctl.v1.journal_pb2 import ModelRecord
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.update_pb2 import CommitWeightUpdateRequest

TOLD_S = 10.0
"""Time for a grant to reach a stage and for the report to return, in seconds."""


OWNER = "another label"

FORMER_LABELS = 64
"""Former labels of a version on record. A stage that missed more labels is healed."""


async def relabel(
    request: CommitWeightUpdateRequest,
    model: str,
    context: Context,
) -> Run:
    """Label the published version of a model ``request.version``.

    The operation fails with WEIGHTS_DIRTY if a stage is DIRTY, and with WEIGHTS_STALE if no stage has the version.
    """
    roster = context.roster
    targets, excluded = roster.select(Target(model=model))
    state = roster.models[model]

    async def work(run: Run) -> None:
        async with roster.publishing:
            run.refuse_given_up()
            if state.update_id:
                raise in_progress(state)
            previous = state.record.latest
            holders = [slot for slot in targets if slot.report is not None and slot.report.weight_version == previous]
            mixed = [slot.name for slot in targets if slot.state == STAGE_STATE_DIRTY]
            # The label was meant for a failed update, not for the version before it.
            if mixed:
                raise Reason.WEIGHTS_DIRTY.error(f"the weights of {mixed[0]} are a mixture", field="version")
            if not holders:
                raise Reason.WEIGHTS_STALE.error(f"no target is at version {previous.label!r}", field="version")
            record = ModelRecord()
            record.CopyFrom(state.record)
            record.latest.label = request.version
            record.former_labels.append(previous.label)
            del record.former_labels[:-FORMER_LABELS]
            # A heal that began now would use the former label.
            state.update_id, state.update_owner = run.operation.operation_id, OWNER
            try:
                await context.journal.write([model_put(record)])
            finally:
                state.update_id = state.update_owner = ""
            versions.publish(state, record)
            for slot in roster.slots.values():
                if slot.model == model:
                    context.peers.grant(slot, adopt=slot in holders)
        roster.changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_S):
                await roster.until(lambda: all(_holds(slot, record.latest) for slot in holders))
        run.operation.weight_version.CopyFrom(record.latest)
        for slot in targets:
            run.add(_result(roster, slot, record.latest, addressed=slot in holders))

    return await context.operations.start(
        request, verb="CommitWeightUpdate", targets=targets, excluded=excluded, work=work, exclusive=True, model=model
    )


def _holds(slot: Slot, version: WeightVersion) -> bool:
    return slot.report is not None and slot.report.weight_version == version


def _result(roster: Roster, slot: Slot, version: WeightVersion, *, addressed: bool) -> StageResult:
    result = StageResult(
        header=roster.header(),
        slot=slot.name,
        incarnation=slot.record.incarnation,
        outcome=OUTCOME_APPLIED,
        state=slot.state,
        weight_version=slot.report.weight_version if slot.report is not None else None,
    )
    if not _holds(slot, version):
        # The stage serves nothing, or still the same weights: no other weights are admitted.
        result.outcome = OUTCOME_UNKNOWN if addressed else OUTCOME_REJECTED
        error = Reason.RANK_SILENT if addressed else Reason.WEIGHTS_STALE
        result.error.CopyFrom(error.error(f"{slot.name} does not hold version {version.label!r}").detail())
    for worker in slot.workers:
        # The stage keeps the version's label for all of its ranks.
        rank = result.rank_results.add(coordinates=worker, outcome=result.outcome, evidence=EVIDENCE_ENGINE)
        if result.HasField("error"):
            rank.error.CopyFrom(result.error)
    result.evidence = EVIDENCE_ENGINE
    return result
