"""The owner of an update, and the targets for which another attempt is in vain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet.model_state import ModelState
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.transaction import transfer
from rlctl.coordinator.transaction.owner import Owner
from rlctl.coordinator.transaction.update import Update
from rlctl.coordinator.transaction.verification_levels import NOTHING, Expected
from rlctl.ports import SystemClock
from rlctl.v1.common_pb2 import (
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    STAGE_STATE_JOINING,
    STAGE_STATE_UPDATING,
)
from rlctl.v1.fleet_pb2 import EngineFailure, RankStatus, StageRegistration, StageReport
from rlctl.v1.journal_pb2 import SlotRecord, UpdateRecord
from rlctl.v1.results_pb2 import RankResult, StageResult
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, BeginWeightUpdateResponse, RolloutStrategy, UpdateTarget

EXPECTED = Expected("d")
FENCED = Reason.TRAINER_FENCED.error("another trainer has come")
CANCELLED = Reason.CANCELLED.error("its owner has given it up")
PLAN = BeginWeightUpdateResponse(targets=[UpdateTarget(slot="a", incarnation=1), UpdateTarget(slot="b", incarnation=2)])


def owner() -> Owner:
    return Owner(cast(ModelState, SimpleNamespace(lease_until=None)), 100.0, 10.0, 10.0, grace_s=2.0)


def test_the_first_decision_about_an_update_counts() -> None:
    trainer = owner()
    trainer.decide(expected=EXPECTED)
    trainer.decide(verdict=FENCED)
    trainer.decide(verdict=CANCELLED)
    assert (trainer.expected, trainer.verdict) == (EXPECTED, None)
    assert trainer.stopped is FENCED, "the verdict counts for the batches that have not begun"
    trainer.next_batch()
    assert trainer.decided.is_set()
    assert trainer.verdict is FENCED


def test_the_decision_about_the_next_batch_is_open() -> None:
    trainer = owner()
    trainer.decide(expected=EXPECTED)
    trainer.next_batch()
    assert not trainer.decided.is_set()
    assert (trainer.expected, trainer.verdict) == (NOTHING, None)


async def test_the_next_batch_begins_without_the_writes_of_the_batch_before() -> None:
    begin = BeginWeightUpdateRequest(rollout=RolloutStrategy(max_unavailable=1))
    roster = SimpleNamespace(min_healthy=lambda _: 0, of_model=lambda _: [])  # no limit
    context = cast(Context, SimpleNamespace(roster=roster, fanout=None, clock=SystemClock(), journal=None))
    update = Update(context, UpdateRecord(request=begin), cast(ModelState, SimpleNamespace()), [slot(), slot()], 100.0)
    update.owner = owner()
    update.owner.decide(expected=EXPECTED)
    update.received, update.broken = [StageResult()], True
    before = update.batch_done
    update.next_batch()
    update.open_batch()
    assert before.is_set()
    assert not update.batch_done.is_set()
    assert (update.received, update.broken, update.owner.decided.is_set()) == ([], False, False)


def test_a_failed_write_shortens_the_lease_and_a_renewal_restores_it() -> None:
    trainer = owner()
    trainer.shorten(1.0)
    assert (trainer.lease_until, trainer.silence) == (3.0, "was not heard for 2 s after a write had failed")
    trainer.shorten(2.0)
    assert trainer.lease_until == 3.0, "the lease never grows by a failure"
    trainer.renew(2.5)
    assert (trainer.lease_until, trainer.silence) == (12.5, "did not renew the lease for 10 s")


def slot(*, alive: bool = True, lost: bool = False, linked: bool = True, **said: Any) -> Slot:
    record = SlotRecord(registration=StageRegistration(slot="a", model="actor"), incarnation=said.pop("incarnation", 1))
    report = StageReport(
        **{"state": STAGE_STATE_UPDATING, "ranks": [RankStatus(alive=alive, reason="" if alive else "killed")]} | said
    )
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


def test_the_result_of_a_lost_target_is_the_worst_of_its_answers() -> None:
    refused, dirty = answer(OUTCOME_APPLIED), answer(OUTCOME_APPLIED)
    refused.outcome, dirty.outcome = OUTCOME_REJECTED, OUTCOME_DIRTY
    assert transfer._result_of_lost(slot(), 1, [refused, answer(OUTCOME_DIRTY, of="b"), dirty]) is dirty


@pytest.mark.parametrize(
    ("target", "reason", "message"),
    [
        (slot(incarnation=2), Reason.INCARNATION_FENCED, "the stage was restarted during the attempt"),
        (slot(alive=False), Reason.RANK_LOST, "rank 0: killed"),
        (slot(engine_failure=EngineFailure(reason="no memory")), Reason.ENGINE_FAILED, "no memory"),
        (slot(lost=True), Reason.UNREACHABLE, "the link to a was lost: connection refused"),
    ],
)
def test_the_result_of_a_lost_target_without_an_answer_says_how_it_was_lost(
    target: Slot, reason: Reason, message: str
) -> None:
    target.away = "connection refused"
    refused = answer(OUTCOME_REJECTED)
    refused.outcome = OUTCOME_REJECTED
    result = transfer._result_of_lost(target, 1, [refused, answer(OUTCOME_DIRTY, of="b")])
    assert (result.slot, result.outcome) == ("a", OUTCOME_UNKNOWN)
    assert (result.error.reason, result.error.message) == (reason.name, message)


def test_a_write_is_a_stray_only_where_no_target_is_in_its_group() -> None:
    stray = StageResult(outcome=OUTCOME_REJECTED, error=Reason.GROUP_NOT_FOUND.error().detail())
    refused = StageResult(outcome=OUTCOME_REJECTED, error=Reason.ILLEGAL_STATE.error().detail())
    taken = StageResult(outcome=OUTCOME_DIRTY, error=Reason.GROUP_NOT_FOUND.error().detail())
    assert transfer._in_no_group([stray, stray])
    for results in ([], [stray, refused], [stray, taken]):
        assert not transfer._in_no_group(results)
