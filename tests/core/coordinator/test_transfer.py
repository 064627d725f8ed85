"""An open update: whose word about it counts, and for which targets another attempt is in vain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet.roster import Slot
from rlctl.coordinator.transaction import transfer
from rlctl.coordinator.transaction.transfer import OpenUpdate
from rlctl.coordinator.transaction.verification_levels import NOTHING, Expected
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    STAGE_STATE_JOINING,
    STAGE_STATE_UPDATING,
)
from rlctl.v1.fleet_pb2 import RankStatus, StageRegistration, StageReport
from rlctl.v1.journal_pb2 import SlotRecord
from rlctl.v1.results_pb2 import RankResult, StageResult
from rlctl.v1.update_pb2 import BeginWeightUpdateResponse, UpdateTarget

EXPECTED = Expected("d")
FENCED = Reason.TRAINER_FENCED.error("another trainer has come")
CANCELLED = Reason.CANCELLED.error("its owner has given it up")
PLAN = BeginWeightUpdateResponse(targets=[UpdateTarget(slot="a", incarnation=1), UpdateTarget(slot="b", incarnation=2)])


def opened() -> OpenUpdate:
    return OpenUpdate(cast(Any, None), cast(Any, None), 10.0, 0.0)


def test_the_first_word_about_an_update_counts() -> None:
    update = opened()
    update.decide(expected=EXPECTED)
    update.decide(verdict=FENCED)
    update.decide(verdict=CANCELLED)
    assert (update.expected, update.verdict) == (EXPECTED, None)
    assert update.stopped is FENCED, "it counts for the batches that have not begun"
    update.turn()
    assert update.decided.is_set()
    assert update.verdict is FENCED


def test_the_next_batch_is_open_for_all_that_the_one_before_was_decided() -> None:
    update = opened()
    update.received, update.broken = [StageResult()], True
    update.decide(expected=EXPECTED)
    waited = update.turned
    update.turn()
    assert waited.is_set()
    assert not update.turned.is_set()
    assert not update.decided.is_set()
    assert (update.expected, update.verdict, update.received, update.broken) == (NOTHING, None, [], False)


def slot(*, alive: bool = True, lost: bool = False, linked: bool = True, **said: Any) -> Slot:
    record = SlotRecord(registration=StageRegistration(slot="a", model="actor"), incarnation=said.pop("incarnation", 1))
    report = StageReport(**{"state": STAGE_STATE_UPDATING, "ranks": [RankStatus(alive=alive)]} | said)
    commander = cast(Any, SimpleNamespace(lost=lost)) if linked else None
    return Slot(record, commander=commander, report=report)


def answer(outcome: int, of: str = "a") -> StageResult:
    return StageResult(slot=of, outcome=OUTCOME_DIRTY, rank_results=[RankResult(outcome=outcome)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "received", "gone"),
    [
        (slot(), [], False),
        (slot(), [answer(OUTCOME_APPLIED)], False),
        (slot(), [answer(OUTCOME_DIRTY)], False),  # all of its ranks are there for another attempt
        (slot(), [answer(OUTCOME_UNKNOWN)], True),
        (slot(), [answer(OUTCOME_UNKNOWN, of="b")], False),
        (slot(alive=False), [], True),
        (slot(lost=True), [], True),
        (slot(linked=False), [], True),
        (slot(state=STAGE_STATE_JOINING), [], True),
        (slot(incarnation=2), [], True),
    ],
)
def test_another_attempt_is_in_vain_for_who_is_away_new_or_short_of_a_rank(
    target: Slot, received: list[StageResult], *, gone: bool
) -> None:
    assert transfer._is_gone(target, PLAN, received) == gone


def test_what_is_known_of_who_is_left_out_is_the_worst_that_it_said() -> None:
    refused, dirty = answer(OUTCOME_APPLIED), answer(OUTCOME_APPLIED)
    refused.outcome, dirty.outcome = OUTCOME_REJECTED, OUTCOME_DIRTY
    assert transfer._what_is_known(slot(), [refused, answer(OUTCOME_DIRTY, of="b"), dirty]) is dirty
    nothing = transfer._what_is_known(slot(), [refused, answer(OUTCOME_DIRTY, of="b")])
    assert (nothing.slot, nothing.outcome, nothing.error.reason) == ("a", OUTCOME_UNKNOWN, "UNREACHABLE")


def test_a_write_is_a_stray_only_where_no_target_is_in_its_group() -> None:
    stray = StageResult(outcome=OUTCOME_REJECTED, error=Reason.GROUP_NOT_FOUND.error().detail())
    refused = StageResult(outcome=OUTCOME_REJECTED, error=Reason.ILLEGAL_STATE.error().detail())
    taken = StageResult(outcome=OUTCOME_DIRTY, error=Reason.GROUP_NOT_FOUND.error().detail())
    assert transfer._in_no_group([stray, stray])
    for results in ([], [stray, refused], [stray, taken]):
        assert not transfer._in_no_group(results)
