"""What SGLang-Omni's router and worker make of mixed versions and of stages that skip."""

from __future__ import annotations

import pytest

from rlctl.errors import Reason
from rlctl.gateway.dialects import omni_results
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_SKIPPED, Outcome, WeightVersion
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, Operation, RankResult, StageResult


def result(slot: str, outcome: Outcome.ValueType = OUTCOME_APPLIED, version: str = "1") -> StageResult:
    why = None if outcome == OUTCOME_APPLIED else Reason.UNSUPPORTED.error("it cannot").detail()
    label = WeightVersion(label=version)
    ranks = [RankResult(outcome=outcome, error=why)]
    return StageResult(slot=slot, outcome=outcome, error=why, weight_version=label, rank_results=ranks)


@pytest.mark.parametrize(("versions", "status"), [(("1", "1"), 200), (("1", "2"), 409)])
def test_mixed_versions_are_a_conflict(versions: tuple[str, str], status: int) -> None:
    results = [result("a", version=versions[0]), result("b", version=versions[1])]
    operation = Operation(verb="GetModelInfo", state=OPERATION_STATE_OK, targets=["a", "b"], stage_results=results)
    reply = omni_results.of_router(operation, "/model_info", str)
    assert (reply.status, reply.body["success"]) == (status, status == 200)
    assert status == 200 or "1, 2" in reply.body["message"]


@pytest.mark.parametrize(("verb", "good"), [("PauseGeneration", True), ("UpdateWeightsFromDisk", False)])
def test_a_skip_counts_except_for_an_update(verb: str, good: bool) -> None:
    state = OPERATION_STATE_OK if good else OPERATION_STATE_FAILED
    skipped = result("a", OUTCOME_SKIPPED)
    operation = Operation(verb=verb, state=state, targets=["a"], stage_results=[skipped])
    [stage] = omni_results.of_worker(operation, "a").body["results"]
    assert (stage["skipped"], stage["unsupported"], stage["success"]) == (True, True, good)
    assert (omni_results.of_router(operation, f"/{verb}", str).status == 200) == good
