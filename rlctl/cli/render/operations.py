"""An operation as tables: a line for each stage, or for each rank with ``-o wide``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlctl.cli.render import columns as data
from rlctl.cli.render import values
from rlctl.cli.render.printer import View
from rlctl.cli.render.tables import Table
from rlctl.contract.errors import InvalidRequest, NotFound, PreconditionFailed, Reason, Unsupported
from rlctl.contract.outcomes import acknowledged
from rlctl.contract.verbs import VERBS
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_REJECTED,
    STAGE_STATE_PAUSED,
    STAGE_STATE_STALE,
    VERIFICATION_LEVEL_NONE,
    Evidence,
    Outcome,
    StageState,
    VerificationLevel,
)
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_RUNNING,
    ExcludedStage,
    Operation,
    OperationState,
    RankResult,
    StageResult,
)

_STAGE = ("SLOT", "OUTCOME", "STATE", "VERSION", "SEQ")
_PROOF = ("EVIDENCE", "VERIFIED", "RANKS", "STEP", "ELAPSED")
_RANK = ("SLOT", "RANK", "OUTCOME", "NODE", "DEVICE", "EVIDENCE", "STEP", "ELAPSED")
_ANSWER = ("SLOT", "RANK", "OUTCOME", "VERSION", "SEQ")
_OPTIONAL = frozenset({"ERROR", "WARNING", "VERIFIED"})


def view(operation: Operation) -> View:
    return View(operation, lambda wide: _tables(operation, wide), lambda: [operation.operation_id])


def listing(operations: Sequence[Operation], wide: bool = False) -> Table:
    headers = ("OPERATION", "VERB", "STATE", "CONFIRMED", "MODEL", "CREATED", "TOOK", "PRINCIPAL", "ERROR")
    return Table(
        (*headers[:-1], "CLIENT", "ERROR") if wide else headers,
        [_line(operation, wide) for operation in operations],
        frozenset({"ERROR"}),
    )


def confirmed(operation: Operation) -> str:
    """Return the number of confirmed targets and of all targets: 2/3."""
    update = is_update(operation)
    count = sum(acknowledged(result, update=update) for result in operation.stage_results)
    return f"{count}/{len(operation.targets)}"


def _line(operation: Operation, wide: bool) -> list[str]:
    took = max(0, operation.done_time.ToNanoseconds() - operation.create_time.ToNanoseconds())
    return [
        operation.operation_id,
        operation.verb,
        values.name_of(OperationState.DESCRIPTOR, operation.state),
        confirmed(operation),
        operation.model,
        values.moment(operation.create_time),
        values.elapsed(took / 1e9) if operation.HasField("done_time") else "",
        values.principal(operation.caller),
        *([values.client(operation.caller)] if wide else ()),
        values.error(operation.error) if wide else operation.error.reason,
    ]


def summary(operation: Operation) -> str:
    """Return a line for stderr."""
    state = values.name_of(OperationState.DESCRIPTOR, operation.state)
    if operation.validate_only:
        targets = values.count(len(operation.targets), "stage")
        return f"{operation.verb}: nothing was done; it would be sent to {targets}."
    update = is_update(operation)
    acknowledging = [result for result in operation.stage_results if acknowledged(result, update=update)]
    parts = [
        f"{operation.verb} {state}: {len(acknowledging)} of {values.count(len(operation.targets), 'stage')} confirmed"
    ]
    if update and operation.weight_version.label:
        parts.append(f"version {values.version(operation.weight_version)}")
    # A stage that cannot be verified serves the new weights all the same: the summary must show the stage.
    unverified = [result.slot for result in acknowledging if result.verified == VERIFICATION_LEVEL_NONE]
    if update and unverified:
        parts.append(f"not verified: {', '.join(unverified)}")
    if update and operation.excluded:
        parts.append(f"excluded: {', '.join(f'{stage.slot} ({stage.reason})' for stage in operation.excluded)}")
    if update and operation.HasField("pause_time"):
        still_paused = any(result.state == STAGE_STATE_PAUSED for result in acknowledging)
        parts.append(f"paused {values.duration(operation.pause_time)}{', still paused' if still_paused else ''}")
    if operation.adapters:
        parts.append(f"adapters {values.adapters(operation.adapters)}")
    if operation.dropped_adapters:
        parts.append(f"adapters dropped: {', '.join(operation.dropped_adapters)}")
    if operation.replayed:
        parts.append("record of an earlier call")
    if operation.state == OPERATION_STATE_RUNNING:
        parts.append(f"follow it with `rlctl get operation {operation.operation_id}`")
    return "; ".join(parts) + f". (operation {operation.operation_id})"


def is_update(operation: Operation) -> bool:
    """Return whether the operation is a weight update. A target of an update that SKIPPED has not confirmed."""
    return bool(operation.update_id) and operation.update_id == operation.operation_id


def unconfirmed(operation: Operation) -> list[str]:
    update = is_update(operation)
    return [result.slot for result in operation.stage_results if not acknowledged(result, update=update)]


def retriable(operation: Operation) -> list[str]:
    """Return the slots that did not confirm, but may confirm at a retry in the present state."""
    update = is_update(operation)
    return [
        result.slot
        for result in operation.stage_results
        if not acknowledged(result, update=update) and not (result.outcome == OUTCOME_REJECTED and _lasting(result))
    ]


def _lasting(result: StageResult) -> bool:
    """Return whether a stage would refuse a retry for the same reason."""
    reason = Reason.__members__.get(result.error.reason, Reason.INTERNAL)
    return issubclass(reason.exception, (InvalidRequest, NotFound, PreconditionFailed, Unsupported))


def stale(operation: Operation) -> list[str]:
    """Return the slots whose weights are at no admitted version now."""
    return [result.slot for result in operation.stage_results if result.state == STAGE_STATE_STALE]


def _tables(operation: Operation, wide: bool) -> list[Table]:
    if operation.validate_only:
        rows = [(slot, "TARGET", "", "") for slot in operation.targets]
        rows += [(stage.slot, "EXCLUDED", _state(stage.state), stage.reason) for stage in operation.excluded]
        return [Table(("SLOT", "OUTCOME", "STATE", "ERROR"), sorted(rows), frozenset({"STATE", "ERROR"}))]
    name = _data_of(operation)
    if wide or name in data.PER_RANK:
        return [_ranks(operation, name, wide=wide)]
    return [_stages(operation, name)]


def _stages(operation: Operation, name: str) -> Table:
    reads = operation.verb in VERBS and not VERBS[operation.verb].mutating
    proof = () if reads else _PROOF
    columns = data.columns(name)
    headers = (*_STAGE, *proof, *(column.header for column in columns), "WARNING", "ERROR")
    rows = [
        [
            *_stage(result),
            *(() if reads else _proof(result)),
            *data.cells(name, result.rank_results),
            values.error(result.warning),
            values.error(result.error),
        ]
        for result in operation.stage_results
    ]
    rows += [_excluded(stage, len(headers), by_rank=False) for stage in operation.excluded]
    return Table(headers, rows, _OPTIONAL | {column.header for column in columns if column.optional})


def _ranks(operation: Operation, name: str, *, wide: bool) -> Table:
    columns = data.columns(name)
    about = _RANK if wide else _ANSWER
    headers = (*about, *(column.header for column in columns), "ERROR")
    rows = []
    for result in operation.stage_results:
        for rank in result.rank_results:
            facts = _rank(result, rank) if wide else _answer(result, rank)
            rows.append([*facts, *data.cells(name, [rank]), values.error(rank.error)])
        if not result.rank_results:
            blank = [""] * (len(headers) - 4)
            rows.append([result.slot, "", _outcome(result), *blank, values.error(result.error)])
    rows += [_excluded(stage, len(headers), by_rank=True) for stage in operation.excluded]
    return Table(headers, rows, _OPTIONAL | {column.header for column in columns if column.optional})


def _stage(result: StageResult) -> Iterator[str]:
    yield result.slot
    yield _outcome(result)
    yield _state(result.state)
    yield result.weight_version.label
    yield values.sequence(result.weight_version)


def _proof(result: StageResult) -> Iterator[str]:
    ranks = result.rank_results
    yield values.name_of(Evidence.DESCRIPTOR, result.evidence)
    yield values.verification(result.verification) or values.name_of(VerificationLevel.DESCRIPTOR, result.verified)
    yield f"{sum(rank.outcome == OUTCOME_APPLIED for rank in ranks)}/{len(ranks)}" if ranks else ""
    yield _steps(ranks)
    yield values.duration(result.elapsed)


def _rank(result: StageResult, rank: RankResult) -> Iterator[str]:
    yield result.slot
    yield str(rank.coordinates.rank)
    yield values.name_of(Outcome.DESCRIPTOR, rank.outcome)
    yield rank.coordinates.node
    yield rank.coordinates.device
    yield values.name_of(Evidence.DESCRIPTOR, rank.evidence)
    yield str(rank.step) if rank.step else ""
    yield values.duration(rank.elapsed)


def _answer(result: StageResult, rank: RankResult) -> Iterator[str]:
    yield result.slot
    yield str(rank.coordinates.rank)
    yield values.name_of(Outcome.DESCRIPTOR, rank.outcome)
    yield result.weight_version.label
    yield values.sequence(result.weight_version)


def _steps(ranks: Sequence[RankResult]) -> str:
    """Return the step that all ranks agree on, or all steps."""
    return values.joined(sorted({rank.step for rank in ranks if rank.step}))


def _excluded(out: ExcludedStage, width: int, *, by_rank: bool) -> list[str]:
    why = f"{_state(out.state)}: {out.reason}"
    return (
        [out.slot, "", "EXCLUDED", *[""] * (width - 4), why]
        if by_rank
        else ([out.slot, "EXCLUDED", *[""] * (width - 3), why])
    )


def _outcome(result: StageResult) -> str:
    return values.name_of(Outcome.DESCRIPTOR, result.outcome)


def _state(state: StageState.ValueType) -> str:
    return values.name_of(StageState.DESCRIPTOR, state)


def _data_of(operation: Operation) -> str:
    """Return the field of RankResult with the verb's data: the field that ranks sent, else the verb table's."""
    for result in operation.stage_results:
        for rank in result.rank_results:
            data_field = rank.WhichOneof("data")
            if data_field is not None:
                return str(data_field)
    return VERBS[operation.verb].data if operation.verb in VERBS else ""
