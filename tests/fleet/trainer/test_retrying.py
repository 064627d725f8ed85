"""Which failures of an attempt are worth another one."""

from __future__ import annotations

import pytest

from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.trainer.lead import _worth_retrying
from rlctl.v1 import common_pb2 as common
from rlctl.v1.results_pb2 import Operation, StageResult


def failed(reason: Reason, *outcomes: common.Outcome.ValueType) -> OperationFailed:
    results = [
        StageResult(slot=str(index), outcome=outcome, error=reason.error("why").detail())
        for index, outcome in enumerate(outcomes)
    ]
    return OperationFailed(Operation(error=reason.error("why").detail(), stage_results=results))


@pytest.mark.parametrize(
    ("error", "worth"),
    [
        (failed(Reason.LINK_LOST, common.OUTCOME_APPLIED, common.OUTCOME_UNKNOWN), True),
        (failed(Reason.GROUP_FAILED, common.OUTCOME_DIRTY), True),
        (failed(Reason.UNREACHABLE, common.OUTCOME_NOT_SENT), True),
        (failed(Reason.CHECKPOINT_MISMATCH, common.OUTCOME_REJECTED), False),
        (failed(Reason.RANK_LOST, common.OUTCOME_REJECTED), True),
        # A source's write that was not let in, because that of another had failed: which is heard of first is chance.
        (failed(Reason.GROUP_FAILED), True),
        (Reason.GROUP_FAILED.error("a rank left"), True),
        (Reason.FIELD_INVALID.error("a shape"), False),
    ],
)
def test_a_group_that_failed_is_and_what_was_asked_for_is_not(error: RlctlError, worth: bool) -> None:
    assert _worth_retrying(error) is worth
