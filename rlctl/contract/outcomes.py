"""How outcomes add up: ranks to a stage, stages to an operation. The one place where "OK means all" is decided."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlctl.contract.errors import Reason, RlctlError, from_detail
from rlctl.contract.verbs import Verb
from rlctl.v1 import common_pb2, results_pb2
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_NOT_SENT,
    OUTCOME_REJECTED,
    OUTCOME_SKIPPED,
    OUTCOME_UNKNOWN,
    ErrorDetail,
    Outcome,
    WorkerCoordinates,
)
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_CANCELLED,
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_PARTIAL,
    OPERATION_STATE_UNKNOWN,
    OperationState,
    RankResult,
    StageResult,
)

_EVIDENCE_WEAKEST_FIRST = (
    common_pb2.EVIDENCE_UNSPECIFIED,
    common_pb2.EVIDENCE_ENGINE,
    common_pb2.EVIDENCE_RANK,
    common_pb2.EVIDENCE_VERIFIED,
)

_FOLLOWED = {Reason.CANCELLED.name, Reason.GROUP_NOT_FOUND.name}
"""Of those who fail because another one did: told to stop, or to leave the group in which that one is missed."""

_KNOWN = frozenset(Outcome.values()) - {common_pb2.OUTCOME_UNSPECIFIED}


def of_ranks(verb: Verb, results: Sequence[RankResult], *, mutates: bool) -> Outcome.ValueType:
    """Outcome of a stage, never better than its worst rank. ``mutates``: whether this request changes anything.

    Ranks that ended differently leave a mixture: DIRTY for a mutating verb, unless the others only SKIPPED something
    that is not a weight update, or it is about files only. Without a rank's answer the outcome is UNKNOWN, whatever
    the others say.
    """
    outcomes = {result.outcome for result in results}
    if not outcomes or not outcomes <= _KNOWN:
        return OUTCOME_UNKNOWN
    for worst in (OUTCOME_UNKNOWN, OUTCOME_DIRTY):
        if worst in outcomes:
            return worst
    if len(outcomes) == 1:
        return outcomes.pop()
    if OUTCOME_APPLIED in outcomes and mutates and not verb.files:
        if outcomes == {OUTCOME_APPLIED, OUTCOME_SKIPPED} and not verb.writes_weights:
            return OUTCOME_APPLIED
        return OUTCOME_DIRTY
    return next(o for o in (OUTCOME_REJECTED, OUTCOME_NOT_SENT, OUTCOME_SKIPPED) if o in outcomes)


def one_per_rank(workers: Sequence[WorkerCoordinates], results: Sequence[RankResult]) -> list[RankResult]:
    """Exactly one entry for every rank of a layout, in its order.

    A rank without an entry, with two, or with one filed under coordinates that no rank has, is an UNKNOWN entry that
    says so: a result is never dropped, and one rank's answer is never taken for another's.
    """
    if [worker.rank for worker in workers] == [result.coordinates.rank for result in results]:
        return list(results)
    by_rank: dict[int, list[RankResult]] = {worker.rank: [] for worker in workers}
    strangers = [r.coordinates.rank for r in results if r.coordinates.rank not in by_rank]
    for result in results:
        by_rank.get(result.coordinates.rank, []).append(result)
    entries = []
    for worker in workers:
        found = by_rank[worker.rank]
        if len(found) == 1:
            entries.append(found[0])
            continue
        why = f"{len(found)} answers came under this rank's number" if found else "no answer came from this rank"
        if strangers:
            why += f"; answers came under ranks that the stage does not have: {strangers}"
        error = Reason.RANK_SILENT.error(why, outcome=OUTCOME_UNKNOWN)
        entries.append(RankResult(coordinates=worker, outcome=OUTCOME_UNKNOWN, error=error.detail()))
    return entries


def explain(outcome: Outcome.ValueType, results: Sequence[RankResult]) -> ErrorDetail | None:
    """Error of the first rank that explains a stage's outcome; those that merely followed come last."""
    if outcome == OUTCOME_APPLIED:
        return None
    blamed = [r for r in results if r.outcome != OUTCOME_APPLIED and r.error.reason]
    if not blamed:
        return Reason.INTERNAL.error("ranks ended without saying why").detail()
    first = min(blamed, key=lambda r: (r.outcome != outcome, r.error.reason in _FOLLOWED))
    detail = ErrorDetail()
    detail.CopyFrom(first.error)
    if len(results) > 1:
        detail.message = of_rank(first.coordinates.rank, detail.message)
    return detail


def of_rank(rank: int, message: str) -> str:
    """What a rank says, with its number, once."""
    named = f"rank {rank}"
    return message if re.match(rf"{named}\b", message) else f"{named}: {message}"


def evidence_of(results: Sequence[RankResult]) -> common_pb2.Evidence.ValueType:
    """The weakest evidence among the ranks."""
    return min((r.evidence for r in results), key=_EVIDENCE_WEAKEST_FIRST.index, default=_EVIDENCE_WEAKEST_FIRST[0])


def acknowledged(result: StageResult, *, update: bool) -> bool:
    """Whether a target confirmed: APPLIED, or SKIPPED where that counts (never for a weight update)."""
    return result.outcome == OUTCOME_APPLIED or (result.outcome == OUTCOME_SKIPPED and not update)


def of_targets(results: Sequence[StageResult], *, update: bool = False) -> OperationState.ValueType:
    """State in which an operation ends, from one result per target."""
    outcomes = {result.outcome for result in results}
    if outcomes == {OUTCOME_APPLIED}:
        return OPERATION_STATE_OK
    if not outcomes.isdisjoint((OUTCOME_UNKNOWN, common_pb2.OUTCOME_UNSPECIFIED)):
        return OPERATION_STATE_UNKNOWN
    confirmed = sum(acknowledged(result, update=update) for result in results)
    if confirmed == len(results) and results:
        return OPERATION_STATE_OK
    if confirmed:
        return OPERATION_STATE_PARTIAL
    cancelled = [r.outcome == OUTCOME_REJECTED and r.error.reason == Reason.CANCELLED.name for r in results]
    return OPERATION_STATE_CANCELLED if cancelled and all(cancelled) else OPERATION_STATE_FAILED


def explain_operation(operation: results_pb2.Operation, *, update: bool = False) -> ErrorDetail | None:
    """Why an operation did not end OK: how many targets did not confirm, and the cause of who is to blame."""
    failed = [r for r in operation.stage_results if not acknowledged(r, update=update)]
    if not failed:
        return None
    first = to_blame(failed)
    detail = ErrorDetail()
    detail.CopyFrom(first.error)
    if len(operation.stage_results) > 1:
        detail.message = (
            f"{len(failed)} of {len(operation.stage_results)} stages did not confirm; {first.slot}: {detail.message}"
        )
    else:
        detail.message = f"{first.slot}: {detail.message}"
    detail.metadata["stages"] = ",".join(r.slot for r in failed)
    return detail


def to_blame(failed: Sequence[StageResult]) -> StageResult:
    """Of targets that did not confirm the first that did worst; those that merely followed come last."""
    order = [OUTCOME_UNKNOWN, OUTCOME_DIRTY, OUTCOME_REJECTED, OUTCOME_NOT_SENT, OUTCOME_SKIPPED]

    def place(result: StageResult) -> tuple[int, bool]:
        at = order.index(result.outcome) if result.outcome in order else -1
        return at, result.error.reason in _FOLLOWED

    return min(failed, key=place)


def blame(result: StageResult) -> RlctlError:
    """The error of a target that did not confirm, naming it."""
    error = from_detail(result.error)
    error.message = f"{result.slot}: {error.message}"
    return error
