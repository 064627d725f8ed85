"""Outcomes of an operation's targets are filed in the targets' order, one for each."""

from __future__ import annotations

import itertools

import pytest

from rlctl.coordinator.operations.operations import Run
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED
from rlctl.v1.journal_pb2 import OperationRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_RUNNING, Operation, StageResult

TARGETS = ("b", "a", "c")


@pytest.mark.parametrize("order", list(itertools.permutations([*TARGETS, "stranger"])))
def test_outcomes_stand_in_the_order_of_the_targets_whatever_order_they_come_in(order: tuple[str, ...]) -> None:
    run = Run(OperationRecord(operation=Operation(targets=TARGETS, state=OPERATION_STATE_RUNNING)))
    for slot in order:
        run.add(StageResult(slot=slot, outcome=OUTCOME_REJECTED))
    for slot in reversed(order):
        answer = StageResult(slot=slot, outcome=OUTCOME_APPLIED)
        run.add(answer)
        answer.outcome = OUTCOME_REJECTED  # what was filed is a copy
    assert [result.slot for result in run.operation.stage_results] == [*TARGETS, "stranger"]
    assert {result.outcome for result in run.operation.stage_results} == {OUTCOME_APPLIED}
