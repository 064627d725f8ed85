"""Sums of outcomes: ranks to a stage, stages to an operation. The only place where "OK means all" is decided."""

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
"""Reasons of ranks or targets that fail as a consequence: a stop, or the end of their group."""

_KNOWN = frozenset(Outcome.values()) - {common_pb2.OUTCOME_UNSPECIFIED}


def of_ranks(verb: Verb, results: Sequence[RankResult], *, mutates: bool) -> Outcome.ValueType:
    """Return the outcome of a stage, never better than its worst rank. ``mutates``: this request changes something.

    Different outcomes leave a mixture: DIRTY for a mutating verb. Two exceptions: a verb that changes files only, and a
    verb without weights whose other ranks only SKIPPED. Without a rank's answer the outcome is UNKNOWN, whatever the
    other ranks answer.
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
    """Return exactly one entry for every rank of a layout, in the layout's order, then one for each further result.

    A rank without an entry, or with two entries, gets an UNKNOWN entry with the cause. No rank's answer counts for a
    different rank. A result of a rank outside the layout gets an UNKNOWN entry with the rank's number: the layout is
    wrong, so the answers may not be those of all ranks.
    """
    if [worker.rank for worker in workers] == [result.coordinates.rank for result in results]:
        return list(results)
    by_rank: dict[int, list[RankResult]] = {worker.rank: [] for worker in workers}
    outside = [result for result in results if result.coordinates.rank not in by_rank]
    for result in results:
        by_rank.get(result.coordinates.rank, []).append(result)
    entries = []
    for worker in workers:
        answers = by_rank[worker.rank]
        if len(answers) == 1:
            entries.append(answers[0])
            continue
        why = f"{len(answers)} answers came under this rank's number" if answers else "no answer came from this rank"
        if outside:
            outside_ranks = [result.coordinates.rank for result in outside]
            why += f"; answers came under ranks that the stage does not have: {outside_ranks}"
        error = Reason.RANK_SILENT.error(why, outcome=OUTCOME_UNKNOWN)
        entries.append(RankResult(coordinates=worker, outcome=OUTCOME_UNKNOWN, error=error.detail()))
    return entries + [_outside(result) for result in outside]


def _outside(result: RankResult) -> RankResult:
    """Return the entry of a result of a rank that the layout does not have."""
    if result.error.reason == Reason.ANSWER_INVALID.name and result.outcome == OUTCOME_UNKNOWN:
        return result  # the entry that the stage has made
    outcome = Outcome.Name(result.outcome) if result.outcome in Outcome.values() else str(result.outcome)
    answer = f"{outcome}: {result.error.message}" if result.error.message else outcome
    error = Reason.ANSWER_INVALID.error(
        f"rank {result.coordinates.rank} is not in the stage's layout, and answered {answer}", outcome=OUTCOME_UNKNOWN
    )
    return RankResult(coordinates=result.coordinates, outcome=OUTCOME_UNKNOWN, error=error.detail())


def explain(outcome: Outcome.ValueType, results: Sequence[RankResult]) -> ErrorDetail | None:
    """Return the error of the first rank that explains a stage's outcome; consequential failures come last."""
    if outcome == OUTCOME_APPLIED:
        return None
    failures = [r for r in results if r.outcome != OUTCOME_APPLIED and r.error.reason]
    if not failures:
        return Reason.INTERNAL.error("ranks ended without saying why").detail()
    first = min(failures, key=lambda r: (r.outcome != outcome, r.error.reason in _FOLLOWED))
    detail = ErrorDetail()
    detail.CopyFrom(first.error)
    if len(results) > 1:
        detail.message = of_rank(first.coordinates.rank, detail.message)
    return detail


def of_rank(rank: int, message: str) -> str:
    """Return a rank's message with the rank's number, once."""
    prefix = f"rank {rank}"
    return message if re.match(rf"{prefix}\b", message) else f"{prefix}: {message}"


def evidence_of(results: Sequence[RankResult]) -> common_pb2.Evidence.ValueType:
    """Return the weakest evidence among the ranks."""
    return min((r.evidence for r in results), key=_EVIDENCE_WEAKEST_FIRST.index, default=_EVIDENCE_WEAKEST_FIRST[0])


def acknowledged(result: StageResult, *, update: bool) -> bool:
    """Return True if a target confirmed: APPLIED, or SKIPPED outside weight updates."""
    return result.outcome == OUTCOME_APPLIED or (result.outcome == OUTCOME_SKIPPED and not update)


def taken_back(result: StageResult, cause: str, outcome: Outcome.ValueType = OUTCOME_REJECTED) -> StageResult:
    """Return the result of a stage whose effect was taken back, with this outcome also at every rank.

    ``outcome``: UNKNOWN if the effect may remain.
    """
    undone = StageResult()
    undone.CopyFrom(result)
    error = Reason.CANCELLED.error(cause).detail()
    undone.outcome = outcome
    undone.error.CopyFrom(error)
    for rank in undone.rank_results:
        rank.outcome = outcome
        rank.error.CopyFrom(error)
    return undone


def of_targets(results: Sequence[StageResult], *, update: bool = False) -> OperationState.ValueType:
    """Return the final state of an operation from one result per target."""
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
    """Return the cause of an operation that did not end OK: number of unconfirmed targets, and the worst error."""
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
    """Return the first unconfirmed target with the worst outcome; targets that failed as a consequence come last."""
    order = [OUTCOME_UNKNOWN, OUTCOME_DIRTY, OUTCOME_REJECTED, OUTCOME_NOT_SENT, OUTCOME_SKIPPED]

    def place(result: StageResult) -> tuple[int, bool]:
        severity = order.index(result.outcome) if result.outcome in order else -1
        return severity, result.error.reason in _FOLLOWED

    return min(failed, key=place)


def blame(result: StageResult) -> RlctlError:
    """Return the error of an unconfirmed target, with the target's name."""
    error = from_detail(result.error)
    error.message = f"{result.slot}: {error.message}"
    return error
