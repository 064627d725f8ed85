"""Exit codes."""

from __future__ import annotations

import pytest

from rlctl.cli.app.exit_codes import Exit, of_error, of_operation, of_reason
from rlctl.contract.errors import OperationFailed, Reason
from rlctl.v1 import results_pb2
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl.v1.results_pb2 import Operation


def operation(state: str, reason: Reason | None = None) -> Operation:
    made = Operation(state=results_pb2.OperationState.Value(f"OPERATION_STATE_{state}"))
    if reason is not None:
        made.error.CopyFrom(reason.error("why").detail())
    return made


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (operation("OK"), Exit.OK),
        (operation("RUNNING"), Exit.OK),
        (operation("PARTIAL", Reason.WEIGHTS_DIRTY), Exit.PARTIAL),
        (operation("UNKNOWN", Reason.RANK_SILENT), Exit.UNKNOWN),
        (operation("FAILED", Reason.ENGINE_FAILED), Exit.FAILED),
        (operation("FAILED", Reason.CHECKPOINT_NOT_FOUND), Exit.FAILED),
        (operation("FAILED", Reason.ILLEGAL_STATE), Exit.CONFLICT),
        (operation("FAILED", Reason.EPOCH_FENCED), Exit.CONFLICT),
        (operation("FAILED"), Exit.FAILED),
        (operation("CANCELLED", Reason.CANCELLED), Exit.FAILED),
    ],
)
def test_an_operation_exits_with_the_code_of_its_end(made: Operation, code: Exit) -> None:
    assert of_operation(made) is code
    if code is not Exit.OK:
        assert of_error(OperationFailed(made), mutating=True) is code


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.FIELD_INVALID, 2),
        (Reason.STAGE_NOT_FOUND, 2),
        (Reason.TOKEN_MISSING, 2),
        (Reason.UNREACHABLE, 5),
        (Reason.DEADLINE_EXCEEDED, 6),
        (Reason.UPDATE_IN_PROGRESS, 7),
        (Reason.MODEL_FROZEN, 7),
        (Reason.EPOCH_FENCED, 7),
        (Reason.NOT_IMPLEMENTED, 1),
        (Reason.NO_ROUTABLE_STAGE, 6),
        (Reason.INTERNAL, 1),
    ],
)
def test_a_refusal_exits_with_the_code_of_its_reason(reason: Reason, code: int) -> None:
    assert of_reason(reason) == code
    assert of_error(reason.error(), mutating=True) == code


@pytest.mark.parametrize("reason", [Reason.UNREACHABLE, Reason.DEADLINE_EXCEEDED, Reason.INTERNAL])
def test_a_change_whose_answer_was_lost_is_unknown_and_a_read_is_not(reason: Reason) -> None:
    lost = reason.error(outcome=OUTCOME_UNKNOWN)
    assert of_error(lost, mutating=True) is Exit.UNKNOWN
    assert of_error(lost, mutating=False) is of_reason(reason)


def test_every_reason_has_a_code_that_means_failure_and_every_code_a_meaning() -> None:
    assert {of_reason(reason) for reason in Reason} <= {1, 2, 5, 6, 7}
    assert all(code.meaning for code in Exit)
