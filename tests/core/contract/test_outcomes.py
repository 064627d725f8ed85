"""How outcomes add up. A dropped, copied or misfiled rank result must never pass for success."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.contract import outcomes
from rlctl.contract.errors import Reason
from rlctl.contract.verbs import VERBS, Verb
from rlctl.v1 import common_pb2 as common
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_NOT_SENT,
    OUTCOME_REJECTED,
    OUTCOME_SKIPPED,
    OUTCOME_UNKNOWN,
    WorkerCoordinates,
)
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_CANCELLED,
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_PARTIAL,
    OPERATION_STATE_UNKNOWN,
    Operation,
    RankResult,
    StageResult,
)

EVERY = (OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_SKIPPED, OUTCOME_NOT_SENT, OUTCOME_DIRTY, OUTCOME_UNKNOWN)
PAUSE, READ, WRITE = VERBS["PauseGeneration"], VERBS["GetModelInfo"], VERBS["UpdateWeightsFromDistributed"]


def ranks(*given_outcomes: int) -> list[RankResult]:
    return [
        RankResult(
            coordinates=WorkerCoordinates(rank=index, tp=index),
            outcome=outcome,
            evidence=common.EVIDENCE_RANK,
            error=None if outcome == OUTCOME_APPLIED else Reason.INTERNAL.error(f"cause {index}").detail(),
        )
        for index, outcome in enumerate(given_outcomes)
    ]


def stages(*given_outcomes: int) -> list[StageResult]:
    return [
        StageResult(slot=f"s{index}", outcome=outcome, error=Reason.INTERNAL.error(f"cause {index}").detail())
        for index, outcome in enumerate(given_outcomes)
    ]


@pytest.mark.parametrize(
    ("verb", "ended", "stage"),
    [
        (PAUSE, (OUTCOME_REJECTED, OUTCOME_SKIPPED), OUTCOME_REJECTED),
        (WRITE, (OUTCOME_NOT_SENT, OUTCOME_REJECTED), OUTCOME_REJECTED),
        (WRITE, (OUTCOME_SKIPPED, OUTCOME_NOT_SENT), OUTCOME_NOT_SENT),
        (PAUSE, (OUTCOME_APPLIED, OUTCOME_SKIPPED), OUTCOME_APPLIED),
        (WRITE, (OUTCOME_APPLIED, OUTCOME_SKIPPED), OUTCOME_DIRTY),
        (PAUSE, (OUTCOME_APPLIED, OUTCOME_SKIPPED, OUTCOME_REJECTED), OUTCOME_DIRTY),
    ],
)
def test_only_where_a_rank_has_changed_something_is_there_a_mixture(
    verb: Verb, ended: tuple[int, ...], stage: int
) -> None:
    results = ranks(*ended)
    assert outcomes.of_ranks(verb, results, mutates=True) == stage
    explained = outcomes.explain(stage, results)  # type: ignore[arg-type]
    assert (explained is None) == (stage == OUTCOME_APPLIED)


def test_who_is_alone_is_not_numbered_and_who_says_nothing_is_said_to() -> None:
    (alone,) = ranks(OUTCOME_REJECTED)
    explained = outcomes.explain(OUTCOME_REJECTED, [alone])
    assert explained is not None
    assert explained.message == alone.error.message
    silent = RankResult(outcome=OUTCOME_UNKNOWN)
    explained = outcomes.explain(OUTCOME_UNKNOWN, [silent, silent])
    assert explained is not None
    assert explained.reason == Reason.INTERNAL.name
    assert outcomes.explain_operation(Operation(stage_results=stages(OUTCOME_APPLIED))) is None
    failed = outcomes.explain_operation(Operation(stage_results=stages(OUTCOME_REJECTED)))
    assert failed is not None
    assert failed.message == "s0: cause 0"


def test_an_operation_is_cancelled_only_where_that_is_why_each_target_refused() -> None:
    cancelled, refused = stages(OUTCOME_REJECTED, OUTCOME_REJECTED)
    cancelled.error.CopyFrom(Reason.CANCELLED.error().detail())
    assert outcomes.of_targets([cancelled, cancelled]) == OPERATION_STATE_CANCELLED
    for results in ([cancelled, refused], [refused], []):
        assert outcomes.of_targets(results) == OPERATION_STATE_FAILED


@pytest.mark.parametrize("outcome", EVERY)
def test_ranks_that_agree_give_that_outcome(outcome: int) -> None:
    for verb in (PAUSE, READ, WRITE):
        assert outcomes.of_ranks(verb, ranks(outcome, outcome), mutates=verb.mutating) == outcome


@given(st.lists(st.sampled_from(EVERY), min_size=1, max_size=8), st.sampled_from([PAUSE, READ, WRITE]))
def test_applied_only_if_every_rank_applied_or_legitimately_skipped(found: list[int], verb: object) -> None:
    outcome = outcomes.of_ranks(verb, ranks(*found), mutates=verb.mutating)
    if outcome == OUTCOME_APPLIED:
        assert set(found) <= {OUTCOME_APPLIED, OUTCOME_SKIPPED}
        assert OUTCOME_APPLIED in found
        if verb.writes_weights:
            assert set(found) == {OUTCOME_APPLIED}
    if OUTCOME_UNKNOWN in found:
        assert outcome == OUTCOME_UNKNOWN


def test_ranks_that_differ_leave_a_mixture() -> None:
    assert outcomes.of_ranks(PAUSE, ranks(OUTCOME_APPLIED, OUTCOME_REJECTED), mutates=True) == OUTCOME_DIRTY
    assert outcomes.of_ranks(WRITE, ranks(OUTCOME_APPLIED, OUTCOME_SKIPPED), mutates=True) == OUTCOME_DIRTY
    assert outcomes.of_ranks(WRITE, ranks(OUTCOME_NOT_SENT, OUTCOME_APPLIED), mutates=True) == OUTCOME_DIRTY


def test_files_that_only_some_hosts_could_write_leave_no_mixture() -> None:
    pull = VERBS["PullWeights"]
    assert outcomes.of_ranks(pull, ranks(OUTCOME_APPLIED, OUTCOME_REJECTED), mutates=True) == OUTCOME_REJECTED
    assert outcomes.of_ranks(pull, ranks(OUTCOME_APPLIED, OUTCOME_UNKNOWN), mutates=True) == OUTCOME_UNKNOWN


def test_a_read_has_no_mixture() -> None:
    assert outcomes.of_ranks(READ, ranks(OUTCOME_APPLIED, OUTCOME_REJECTED), mutates=False) == OUTCOME_REJECTED


def test_no_rank_and_an_unset_outcome_are_unknown() -> None:
    assert outcomes.of_ranks(PAUSE, [], mutates=True) == OUTCOME_UNKNOWN
    assert outcomes.of_ranks(PAUSE, ranks(OUTCOME_APPLIED, 0), mutates=True) == OUTCOME_UNKNOWN
    assert outcomes.of_ranks(PAUSE, ranks(OUTCOME_APPLIED, 99), mutates=True) == OUTCOME_UNKNOWN


def test_a_dropped_rank_result_is_an_unknown_entry_with_its_reason() -> None:
    workers = [WorkerCoordinates(rank=rank) for rank in range(3)]
    entries = outcomes.one_per_rank(workers, [r for r in ranks(*[OUTCOME_APPLIED] * 3) if r.coordinates.rank != 1])
    assert [(e.coordinates.rank, e.outcome) for e in entries] == [
        (0, OUTCOME_APPLIED),
        (1, OUTCOME_UNKNOWN),
        (2, OUTCOME_APPLIED),
    ]
    assert entries[1].error.reason == "RANK_SILENT"
    assert outcomes.of_ranks(PAUSE, entries, mutates=True) == OUTCOME_UNKNOWN


def test_a_copied_rank_result_is_not_taken_for_another_ranks() -> None:
    workers = [WorkerCoordinates(rank=rank) for rank in range(2)]
    first = ranks(OUTCOME_APPLIED)[0]
    entries = outcomes.one_per_rank(workers, [first, first])
    assert [e.outcome for e in entries] == [OUTCOME_UNKNOWN, OUTCOME_UNKNOWN]
    assert "2 answers came under this rank's number" in entries[0].error.message


def test_an_answer_under_a_strange_rank_is_named() -> None:
    entries = outcomes.one_per_rank([WorkerCoordinates(rank=0)], [RankResult(coordinates=WorkerCoordinates(rank=7))])
    assert entries[0].outcome == OUTCOME_UNKNOWN
    assert "[7]" in entries[0].error.message


def test_an_answer_of_a_rank_outside_the_layout_is_not_lost_when_all_ranks_answered() -> None:
    workers = [WorkerCoordinates(rank=rank) for rank in range(2)]
    failed = RankResult(coordinates=WorkerCoordinates(rank=7), outcome=OUTCOME_DIRTY)
    failed.error.CopyFrom(Reason.ENGINE_FAILED.error("half written").detail())
    entries = outcomes.one_per_rank(workers, [*ranks(OUTCOME_APPLIED, OUTCOME_APPLIED), failed])
    assert [(e.coordinates.rank, e.outcome) for e in entries] == [
        (0, OUTCOME_APPLIED),
        (1, OUTCOME_APPLIED),
        (7, OUTCOME_UNKNOWN),
    ]
    assert entries[2].error.reason == "ANSWER_INVALID"
    assert "rank 7 is not in the stage's layout, and answered OUTCOME_DIRTY: half written" in entries[2].error.message
    assert outcomes.of_ranks(PAUSE, entries, mutates=True) == OUTCOME_UNKNOWN
    assert outcomes.one_per_rank(workers, entries) == entries  # the coordinator checks again what the stage has checked


def test_the_error_is_that_of_a_rank_with_the_outcome_and_not_of_one_that_followed() -> None:
    found = ranks(OUTCOME_REJECTED, OUTCOME_REJECTED)
    found[0].error.CopyFrom(Reason.CANCELLED.error("rank 1 refused").detail())
    detail = outcomes.explain(OUTCOME_REJECTED, found)
    assert detail is not None
    assert detail.message == "rank 1: cause 1"
    found = ranks(OUTCOME_REJECTED, OUTCOME_UNKNOWN)
    detail = outcomes.explain(OUTCOME_UNKNOWN, found)
    assert detail is not None
    assert detail.message == "rank 1: cause 1"


def test_who_was_told_to_leave_its_group_is_not_to_blame() -> None:
    operation = Operation(stage_results=stages(OUTCOME_REJECTED, OUTCOME_REJECTED))
    operation.stage_results[0].error.CopyFrom(Reason.GROUP_NOT_FOUND.error().detail())
    detail = outcomes.explain_operation(operation, update=True)
    assert detail is not None
    assert detail.message.endswith("s1: cause 1")


def test_evidence_is_the_weakest() -> None:
    found = ranks(OUTCOME_APPLIED, OUTCOME_APPLIED)
    found[1].evidence = common.EVIDENCE_ENGINE
    assert outcomes.evidence_of(found) == common.EVIDENCE_ENGINE


def test_ok_means_all_targets_for_every_combination() -> None:
    for combination in itertools.product(EVERY, repeat=3):
        for update in (False, True):
            state = outcomes.of_targets(stages(*combination), update=update)
            confirmed = [o == OUTCOME_APPLIED or (o == OUTCOME_SKIPPED and not update) for o in combination]
            if OUTCOME_UNKNOWN in combination:
                assert state == OPERATION_STATE_UNKNOWN
            elif all(confirmed):
                assert state == OPERATION_STATE_OK
            elif any(confirmed):
                assert state == OPERATION_STATE_PARTIAL
            else:
                assert state == OPERATION_STATE_FAILED


def test_no_targets_is_not_ok() -> None:
    assert outcomes.of_targets([]) == OPERATION_STATE_FAILED


def test_an_operations_error_counts_and_names_the_stages() -> None:
    operation = Operation(stage_results=stages(OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_UNKNOWN))
    detail = outcomes.explain_operation(operation)
    assert detail is not None
    assert detail.message == "2 of 3 stages did not confirm; s2: cause 2"
    assert detail.metadata["stages"] == "s1,s2"


def test_what_a_rank_says_has_its_number_once() -> None:
    assert outcomes.of_rank(1, "it broke") == "rank 1: it broke"
    assert outcomes.of_rank(1, "rank 1 lost the connection") == "rank 1 lost the connection"
    assert outcomes.of_rank(1, "rank 12 is gone") == "rank 1: rank 12 is gone"
