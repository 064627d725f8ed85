"""What answers prove of a target's weights, and whom a mismatch names."""

from __future__ import annotations

import pytest

from rlctl.contract.errors import Reason
from rlctl.contract.fingerprints import differing, fingerprints
from rlctl.coordinator.transaction import verification_levels
from rlctl.trainer.mismatch_report import blame_ranks, parts_in_question
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_DIRTY, OUTCOME_REJECTED, ErrorDetail, WorkerCoordinates
from rlctl.v1.results_pb2 import Operation, RankResult, StageResult
from rlctl.v1.trainer_pb2 import Sent
from rlctl.v1.verbs_pb2 import CheckReport, Probe, ProbePrompt, TensorDifference, TensorDigest, TensorPart


def rank(number: int, part: TensorPart | None, first: str = "w") -> RankResult:
    difference = TensorDifference(count=2, tensors=7, first=first, part=part)
    coordinates = WorkerCoordinates(rank=number)
    return RankResult(coordinates=coordinates, outcome=OUTCOME_APPLIED, check=CheckReport(difference=difference))


def row(start: int, digest: str) -> TensorPart:
    return TensorPart(name="w", dim=0, start=start, length=4, digest=digest)


def stage(*ranks: RankResult) -> StageResult:
    error = ErrorDetail(message="it differs: w")
    return StageResult(slot="a", outcome=OUTCOME_APPLIED, rank_results=ranks, error=error)


@pytest.mark.parametrize(
    ("parts", "said", "metadata"),
    [
        ([row(0, "1"), row(4, "2")], "of which ranks 0, 1 hold a part each", {"holders": "0,1"}),
        ([None, row(0, "1")], "at rank 1", {"ranks": "1"}),
        ([TensorPart(name="w", differs=False), TensorPart(name="w", differs=True)], "at rank 1", {"ranks": "1"}),
        ([TensorPart(name="w", differs=True), TensorPart(name="w", differs=True)], "at ranks 0, 1", {"ranks": "0,1"}),
    ],
)
def test_a_mismatch_names_the_ranks_that_are_known_to_be_wrong_or_all_that_may_be(
    parts: list[TensorPart | None], said: str, metadata: dict[str, str]
) -> None:
    answer = stage(*(rank(number, part) for number, part in enumerate(parts)))
    error = verification_levels.named(Reason.DIGEST_MISMATCH.error("other weights"), answer)
    assert error.message == f"other weights; 2 of 7 tensors differ, first w, {said}"
    assert error.metadata == {"tensor": "w", "differing": "2"} | metadata


def test_a_mismatch_that_nobody_can_explain_stays_as_it_is() -> None:
    refused = stage(rank(0, row(0, "1")))
    refused.outcome = OUTCOME_REJECTED
    for answer in (stage(rank(0, None, first="")), refused, StageResult(outcome=OUTCOME_APPLIED)):
        error = verification_levels.named(Reason.DIGEST_MISMATCH.error("other weights"), answer)
        assert (error.message, error.metadata) == ("other weights", {})


def test_the_sources_say_whose_part_is_wrong_unless_they_have_changed_since() -> None:
    def operation() -> Operation:
        error = ErrorDetail(message="1 of 1 are left; a: it differs: w")
        return Operation(stage_results=[stage(rank(0, row(0, "1")), rank(1, row(4, "2")))], error=error)

    wrong = operation()
    parts = parts_in_question(wrong)
    assert [(part.name, part.start) for part in parts] == [("w", 0), ("w", 4)]
    answer = Sent(digests=[TensorDigest(name="w", sha256="as sent")], parts=[row(0, "1"), row(4, "other")])
    blame_ranks(wrong, {"w": "as sent"}, [Sent(), answer])
    (result,) = wrong.stage_results
    assert [r.check.difference.part.differs for r in result.rank_results] == [False, True]
    assert result.error.message == "it differs: w; it is the part of rank 1 that differs"
    assert wrong.error.message.endswith("it is the part of rank 1 that differs")
    assert result.error.metadata["ranks"] == "1"
    assert not parts_in_question(wrong)

    unclear = operation()
    blame_ranks(unclear, {"w": "as it was then"}, [answer])
    assert unclear == operation()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([[-1.0, -2.0]], ""),
        ([[-1.005, -2.0]], ""),
        ([[-1.0, -2.5]], "token 2 of prompt 0"),
        ([[-1.0, float("nan")]], "token 2 of prompt 0"),
        ([[-1.0, float("-inf")]], "token 2 of prompt 0"),
        ([[-1.0]], "1 log probabilities of prompt 0, not 2"),
        ([], "did not answer every prompt"),
        ([[-1.0, -2.0], [-1.0]], "did not answer every prompt"),
    ],
)
def test_a_probe_passes_within_its_tolerance_and_only_as_a_whole(found: list[list[float]], said: str) -> None:
    probe = Probe(prompts=[ProbePrompt(token_ids=[1, 2, 3], logprobs=[-1, -2])], tolerance=0.01)
    check = CheckReport(probed=[ProbePrompt(token_ids=[1, 2, 3], logprobs=values) for values in found])
    result = StageResult(slot="a", outcome=OUTCOME_APPLIED, rank_results=[RankResult(check=check), RankResult()])
    wrong = verification_levels.judge_probe([result], probe)
    assert list(wrong) == (["a"] if said else [])
    if said:
        assert said in wrong["a"].message
        assert (wrong["a"].reason, wrong["a"].outcome) == (Reason.PROBE_MISMATCH, OUTCOME_DIRTY)


def test_fingerprints_say_which_tensors_differ() -> None:
    digests = {name: format(number, "x") * 64 for number, name in enumerate("cab", 1)}
    expected = fingerprints(digests)
    assert len(expected) == 24
    assert differing(digests, expected) == []
    assert differing(digests | {"a": "f" * 64, "c": "0" * 64}, expected) == ["a", "c"]
    assert differing({"a": "1" * 64}, expected) == [], "of another number nothing can be said"
