"""Outcomes of an operation's targets are filed in the targets' order; observers and timelines cannot fail it."""

from __future__ import annotations

import itertools

import pytest

from rlctl.coordinator.fleet.observer import Observer, Observers
from rlctl.coordinator.operations.run import Run
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED
from rlctl.v1.journal_pb2 import OperationRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_RUNNING, Operation, Phase, StageResult, Timeline

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


def test_a_timeline_that_cannot_be_written_is_logged_and_the_others_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(timeline: Timeline) -> None:
        raise ValueError("no such time")

    run = Run(OperationRecord(operation=Operation(verb="FlushCache", operation_id="one")))
    run.timelines = [fail, lambda timeline: timeline.phases.append(Phase(steps=1))]
    run.write_timeline()
    assert [phase.steps for phase in run.record.timeline.phases] == [1]
    assert "FlushCache one" in caplog.text


def test_an_observer_that_fails_is_logged_and_the_others_receive_the_event(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Observer):
        def operation_ended(self, record: OperationRecord, took_s: float, traceparent: str) -> None:
            raise ValueError("defect")

        def fan_out_ended(self, verb: str, took_s: float) -> None:
            raise ValueError("defect")

        def quarantined(self, model: str, reason: str) -> None:
            raise ValueError("defect")

    class Recording(Observer):
        def __init__(self) -> None:
            self.events: list[object] = []

        def operation_ended(self, record: OperationRecord, took_s: float, traceparent: str) -> None:
            self.events.append((record.operation.operation_id, took_s, traceparent))

        def fan_out_ended(self, verb: str, took_s: float) -> None:
            self.events.append((verb, took_s))

        def quarantined(self, model: str, reason: str) -> None:
            self.events.append((model, reason))

    recording = Recording()
    observers = Observers([Failing(), recording])
    observers.operation_ended(OperationRecord(operation=Operation(operation_id="one")), 1.0, "trace")
    observers.fan_out_ended("FlushCache", 2.0)
    observers.quarantined("actor", "DIRTY")
    assert recording.events == [("one", 1.0, "trace"), ("FlushCache", 2.0), ("actor", "DIRTY")]
    assert caplog.text.count("Failing failed at an event") == 3
