"""At which level a target is verified, and what its answers prove."""

from __future__ import annotations

from typing import Any

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.transaction import verification_levels
from rlctl.coordinator.transaction.verification_levels import NOTHING, Expected
from rlctl.v1 import common_pb2 as common
from rlctl.v1.common_pb2 import (
    EVIDENCE_ENGINE,
    EVIDENCE_RANK,
    OUTCOME_APPLIED,
    OUTCOME_DIRTY,
    OUTCOME_REJECTED,
    OUTCOME_UNKNOWN,
    TRANSPORT_DISK,
    TRANSPORT_TORCH_GLOO,
    WorkerCoordinates,
)
from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_EXPECTED as EXPECTED
from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_NONE as NONE
from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_PROBE as PROBE
from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_RECEIVED as RECEIVED
from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_REPLICA as REPLICA
from rlctl.v1.fleet_pb2 import Capabilities, StageRegistration, StageReport
from rlctl.v1.journal_pb2 import SlotRecord
from rlctl.v1.results_pb2 import RankResult, StageResult
from rlctl.v1.verbs_pb2 import CheckReport, Probe, UpdateOptions, WeightsReport

ALL = (PROBE, RECEIVED, REPLICA, EXPECTED)
WHOLE = Expected("digest", "sent")


def slot(name: str = "a", can: tuple[int, ...] = ALL, *, opaque: bool = False, released: tuple[int, ...] = ()) -> Slot:
    capabilities = Capabilities(verification=can, answers_for_ranks=opaque)  # type: ignore[arg-type]
    record = SlotRecord(registration=StageRegistration(slot=name, capabilities=capabilities))
    return Slot(record, report=StageReport(released=released))  # type: ignore[arg-type]


def options(verify: int = 0, *, probe: bool = False) -> UpdateOptions:
    return UpdateOptions(verify=verify, probe=Probe() if probe else None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "transport", "probe", "replicas", "levels"),
    [
        (slot(), TRANSPORT_TORCH_GLOO, True, 2, {NONE, RECEIVED, REPLICA, EXPECTED}),
        (slot(), TRANSPORT_TORCH_GLOO, False, 2, {NONE, RECEIVED, REPLICA, EXPECTED}),
        (slot(), TRANSPORT_DISK, True, 1, {NONE, EXPECTED}),
        (slot(can=(PROBE,), opaque=True), TRANSPORT_TORCH_GLOO, True, 2, {NONE}),
        (slot(can=(PROBE,), opaque=True), TRANSPORT_TORCH_GLOO, False, 2, set()),
        (Slot(slot().record), TRANSPORT_DISK, True, 1, {NONE, EXPECTED}),
    ],
)
def test_a_level_is_reached_where_engine_path_and_fleet_allow_it(
    target: Slot,
    transport: Any,
    probe: bool,
    replicas: int,
    levels: set[int],
) -> None:
    together = [target, slot("b")][:replicas]
    obstacles = verification_levels.reached(target, transport, options(probe=probe), together)
    assert {level for level, why in obstacles.items() if not why} == levels


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        (slot(), ""),
        (Slot(slot().record), ""),
        (slot(can=(RECEIVED,)), "its engine has no code for it"),
        (slot(released=(common.MEMORY_TAG_KV_CACHE,)), "its KV cache is released, so it can compute nothing"),
        (slot(released=(common.MEMORY_TAG_WEIGHTS,)), ""),
    ],
)
@pytest.mark.parametrize("verify", [0, NONE, PROBE, EXPECTED])
def test_a_probe_is_refused_for_a_target_that_cannot_compute_it(target: Slot, cause: str, verify: int) -> None:
    if verify == EXPECTED and EXPECTED not in target.capabilities.verification:
        verify = 0
    error = refused(verify, target, probe=True)
    if not cause:
        assert error is None
        return
    assert error is not None
    assert (error.reason, error.field) == (Reason.VERIFICATION_UNREACHABLE, "options.probe")
    assert error.message == f"a cannot compute the probe: {cause}"
    assert refused(0, target) is None, "without a probe it is a target like the others"


def test_evidence_is_recorded_by_kind_and_the_weakest_counts_for_all() -> None:
    both = verification_levels.certificate(EXPECTED, probed=True, decode=True)
    assert both == common.Verification(held=EXPECTED, computed=PROBE, decode=True)
    bytes_alone = verification_levels.certificate(RECEIVED, probed=False, decode=False)
    assert bytes_alone == common.Verification(held=RECEIVED, computed=NONE)
    assert verification_levels.weakest([both, bytes_alone]) == bytes_alone
    assert verification_levels.weakest([both, both]) == both
    assert verification_levels.weakest([]) == common.Verification()


def refused(wanted: int, *targets: Slot, probe: bool = False) -> RlctlError | None:
    transports: dict[str, Any] = {each.name: TRANSPORT_TORCH_GLOO for each in targets}
    try:
        verification_levels.refuse_unreachable(options(wanted, probe=probe), targets, transports, targets)
    except RlctlError as error:
        return error
    return None


def test_a_level_that_one_target_cannot_reach_is_refused_and_names_it() -> None:
    able, unable = slot("able"), slot("unable", can=(RECEIVED,))
    for level in (0, NONE, RECEIVED):
        assert refused(level, able, unable) is None
    error = refused(EXPECTED, able, unable)
    assert error is not None
    assert (error.reason, error.field) == (Reason.VERIFICATION_UNREACHABLE, "options.verify")
    assert error.message.startswith("unable cannot verify at level expected: ")
    assert error.message.endswith("it reaches: none, received")
    assert error.next_step == Reason.VERIFICATION_UNREACHABLE.next_step
    error = refused(EXPECTED, slot(can=(PROBE,)))
    assert error is not None
    assert "probe" not in error.next_step, "its ranks answer for themselves"
    missing = refused(PROBE, able)
    assert missing is not None
    assert (missing.reason, missing.field) == (Reason.FIELD_REQUIRED, "options.probe")
    assert refused(PROBE, able, probe=True) is None


def test_a_level_that_an_engine_has_a_reason_against_is_refused_with_that_reason() -> None:
    target = slot(can=())
    target.capabilities.unsupported["verify=received"] = "bytes that arrive prove no load"
    with pytest.raises(RlctlError) as refused:
        verification_levels.refuse_unreachable(options(RECEIVED), [target], {"a": TRANSPORT_TORCH_GLOO}, [target])
    assert refused.value.reason is Reason.VERIFICATION_UNREACHABLE
    assert "bytes that arrive prove no load" in refused.value.message


def test_who_reaches_no_level_at_all_is_refused_and_told_what_would_do() -> None:
    for can, step in (((PROBE,), "Pass a probe"), ((), Reason.VERIFICATION_UNREACHABLE.next_step)):
        error = refused(0, slot(), slot("b", can=can, opaque=True))
        assert error is not None
        assert error.message.startswith("b reaches no level of verification; none: its engine gives one answer")
        assert error.next_step.startswith(step)
    assert refused(0, slot("b", can=(PROBE,), opaque=True), probe=True) is None


def chosen(
    target: Slot, verify: int = 0, expected: Expected = WHOLE, *, digesting: bool = True, **more: Any
) -> common.VerificationLevel.ValueType:
    together = [target, slot("b")]
    transports: dict[str, Any] = {target.name: TRANSPORT_TORCH_GLOO}
    return verification_levels.levels(
        options(verify), [target], transports, expected, together, digesting=["a"] if digesting else [], **more
    )["a"]


def test_the_highest_level_that_can_be_judged_is_taken() -> None:
    assert chosen(slot()) == EXPECTED
    assert chosen(slot(), NONE) == NONE
    assert chosen(slot(), expected=Expected(sent="sent")) == REPLICA
    assert chosen(slot(can=(RECEIVED,))) == RECEIVED
    assert chosen(slot(can=(RECEIVED,)), digesting=False) == NONE
    assert chosen(slot(can=(RECEIVED,)), expected=NOTHING) == NONE
    opaque = slot(can=(EXPECTED,), opaque=True)
    with pytest.raises(RlctlError) as nothing:
        chosen(opaque, expected=NOTHING)
    assert nothing.value.reason is Reason.VERIFICATION_UNREACHABLE
    assert chosen(opaque, expected=NOTHING, adapter=True) == NONE


@pytest.mark.parametrize(
    ("verify", "given"), [(EXPECTED, Expected(sent="sent")), (RECEIVED, Expected(digest="digest"))]
)
def test_a_level_by_name_needs_its_digest(verify: int, given: Expected) -> None:
    assert chosen(slot(), verify) == verify
    with pytest.raises(RlctlError) as caught:
        chosen(slot(), verify, given)
    assert (caught.value.reason, caught.value.field) == (Reason.FIELD_REQUIRED, "expected_digest")


@pytest.mark.parametrize(
    ("can", "verify", "partial", "replicas", "digests"),
    [
        (ALL, 0, False, 1, False),
        (ALL, 0, True, 1, True),
        (ALL, 0, True, 2, False),
        ((RECEIVED,), 0, False, 2, True),
        ((PROBE,), 0, False, 2, False),
        (ALL, RECEIVED, False, 2, True),
        (ALL, EXPECTED, True, 1, False),
    ],
)
def test_a_target_digests_what_comes_where_nothing_higher_will_be_judged(
    can: tuple[int, ...],
    verify: int,
    partial: bool,
    replicas: int,
    digests: bool,
) -> None:
    target = slot(can=can)
    together = [target, slot("b")][:replicas]
    found = verification_levels.digests_what_comes(
        options(verify), target, TRANSPORT_TORCH_GLOO, together, partial=partial
    )
    assert found == digests


def said(name: str, *digests: str, outcome: int = OUTCOME_APPLIED, inconsistent: str = "") -> StageResult:
    reports = [
        CheckReport(model_digest=digest, inconsistent=[inconsistent] if inconsistent else []) for digest in digests
    ]
    ranks = [RankResult(check=report) for report in reports]
    return StageResult(slot=name, outcome=outcome, rank_results=ranks)  # type: ignore[arg-type]


def scaled(name: str, *scales: float | None) -> StageResult:
    ranks = [RankResult(check=CheckReport(adapter_scale=scale)) for scale in scales]
    return StageResult(slot=name, outcome=OUTCOME_APPLIED, rank_results=ranks)


@pytest.mark.parametrize(
    ("expected", "answers", "right", "wrong"),
    [
        (2.0, [scaled("a", 2, 2), scaled("b", 2)], 2.0, ""),
        (2.0, [scaled("a", 2), scaled("b", 4)], 2.0, "b"),
        (2.0, [scaled("a", 4), scaled("b", 4)], 2.0, "ab"),
        (2.0, [scaled("a", 2, 4)], 2.0, "a"),
        (2.0, [scaled("a", None)], 2.0, ""),
        (None, [scaled("a", 2), scaled("b", 2)], 2.0, ""),
        (None, [scaled("a", 2), scaled("b", 4)], None, "ab"),
        (None, [scaled("a", 2, 4)], None, "a"),
        (None, [scaled("a", None), scaled("b", 2)], 2.0, ""),
        (None, [scaled("a", None)], None, ""),
        (None, [], None, ""),
    ],
)
def test_an_adapter_has_one_scale(
    expected: float | None, answers: list[StageResult], right: float | None, wrong: str
) -> None:
    errors, scale = verification_levels.judge_scales(answers, expected)
    assert ("".join(sorted(errors)), scale) == (wrong, right)


@pytest.mark.parametrize(
    ("level", "expected", "answers", "wrong"),
    [
        (EXPECTED, WHOLE, [said("a", "digest", "digest"), said("b", "digest")], ""),
        (EXPECTED, WHOLE, [said("a", "digest")], ""),
        (EXPECTED, WHOLE, [said("a", "digest"), said("b", "other")], "b"),
        (EXPECTED, WHOLE, [said("a", "other"), said("b", "other")], "ab"),
        (EXPECTED, WHOLE, [said("a", "digest", "other")], "a"),
        (EXPECTED, WHOLE, [said("a", "digest", "")], "a"),
        (EXPECTED, NOTHING, [said("a", "")], "a"),
        (EXPECTED, WHOLE, [said("a")], "a"),
        (EXPECTED, WHOLE, [said("a", "digest", inconsistent="w")], "a"),
        (EXPECTED, WHOLE, [said("a", "digest", outcome=OUTCOME_REJECTED)], "a"),
        (REPLICA, NOTHING, [said("a", "one"), said("b", "one")], ""),
        (REPLICA, NOTHING, [said("a", "one"), said("b", "other")], "ab"),
        (REPLICA, NOTHING, [said("a", "one")], "a"),
        (REPLICA, NOTHING, [said("a", "one"), said("b", "")], "ab"),
        (REPLICA, Expected(served="one"), [said("a", "one")], ""),
        (REPLICA, Expected(served="one"), [said("a", "one"), said("b", "other")], "b"),
        (REPLICA, Expected(served="other"), [said("a", "one"), said("b", "one")], "ab"),
    ],
)
def test_a_digest_proves_what_it_is_compared_with(
    level: Any, expected: Expected, answers: list[StageResult], wrong: str
) -> None:
    found = verification_levels.judge_digests(answers, {"a": level, "b": level}, expected)
    assert sorted(found) == sorted(wrong)
    assert {error.outcome for error in found.values()} <= {OUTCOME_DIRTY}


def test_levels_are_judged_side_by_side() -> None:
    answers = [said("a", "digest"), said("b", "digest"), said("c", "other")]
    found = verification_levels.judge_digests(answers, {"a": EXPECTED, "b": REPLICA, "c": REPLICA}, WHOLE)
    assert sorted(found) == ["b", "c"]
    answers[1] = said("b", "other")
    found = verification_levels.judge_digests(answers, {"a": EXPECTED, "b": REPLICA, "c": REPLICA}, WHOLE)
    assert not found, "what the source vouches for is no replica"


def test_a_digest_that_may_never_have_been_computed_is_not_known_to_be_wrong() -> None:
    silent = said("a", outcome=OUTCOME_UNKNOWN)
    assert verification_levels.judge_digests([silent], {"a": EXPECTED}, WHOLE)["a"].outcome == OUTCOME_UNKNOWN
    assert verification_levels.judge_probe([silent], Probe())["a"].outcome == OUTCOME_UNKNOWN
    assert verification_levels.judge_probe([said("a", outcome=OUTCOME_REJECTED)], Probe())["a"].outcome == OUTCOME_DIRTY


def test_what_each_rank_took_in_is_what_was_sent() -> None:
    def took(*digests: str) -> StageResult:
        ranks = [
            RankResult(coordinates=WorkerCoordinates(rank=rank), weights=WeightsReport(received_digest=digest))
            for rank, digest in enumerate(digests)
        ]
        return StageResult(slot="a", rank_results=ranks)

    assert not verification_levels.judge_received([took("sent", "sent")], WHOLE)
    for digests, rank in ((("sent", "other"), "1"), (("", "sent"), "0"), (("other", "other"), "0")):
        found = verification_levels.judge_received([took(*digests)], WHOLE)
        assert (found["a"].metadata["ranks"], found["a"].outcome) == (rank, OUTCOME_DIRTY)


def test_one_answer_for_all_ranks_proves_nothing_where_nothing_is_verified() -> None:
    answers = [
        StageResult(slot=name, evidence=evidence) for name, evidence in (("a", EVIDENCE_ENGINE), ("b", EVIDENCE_RANK))
    ]
    assert list(verification_levels.judge_evidence(answers, {"a": NONE, "b": NONE}, probed=False)) == ["a"]
    assert not verification_levels.judge_evidence(answers, {"a": NONE, "b": NONE}, probed=True)
    assert not verification_levels.judge_evidence(answers, {"a": RECEIVED, "b": NONE}, probed=False)
    assert not verification_levels.judge_evidence(answers, {}, probed=False)


@pytest.mark.parametrize("required", [True, False])
def test_a_stage_that_is_dirty_after_the_decode_check_is_wrong_also_unrequested(required: bool) -> None:
    error = Reason.WEIGHTS_DIRTY.error("its memory was written").detail()
    dirty = StageResult(slot="a", outcome=OUTCOME_DIRTY, error=error)
    wrong, passed = verification_levels.judge_decode([dirty], required=required)
    assert (wrong["a"].reason, wrong["a"].outcome, passed) == (Reason.DECODE_MISMATCH, OUTCOME_DIRTY, frozenset())
