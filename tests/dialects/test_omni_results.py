"""What SGLang-Omni's router and worker make of mixed versions and of stages that skip."""

from __future__ import annotations

import pytest

from rlctl.contract.errors import Reason
from rlctl.gateway.dialects.omni import replies
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_SKIPPED, Outcome, WeightVersion
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    Operation,
    OperationState,
    RankResult,
    StageResult,
)
from rlctl.v1.verbs_pb2 import CHECK_ACTION_COMPARE, CheckReport, ModelInfo


def result(slot: str, outcome: Outcome.ValueType = OUTCOME_APPLIED, version: str = "1") -> StageResult:
    why = None if outcome == OUTCOME_APPLIED else Reason.UNSUPPORTED.error("it cannot").detail()
    label = WeightVersion(label=version)
    ranks = [RankResult(outcome=outcome, error=why)]
    return StageResult(slot=slot, outcome=outcome, error=why, weight_version=label, rank_results=ranks)


@pytest.mark.parametrize(("versions", "status"), [(("1", "1"), 200), (("1", "2"), 409)])
def test_mixed_versions_are_a_conflict(versions: tuple[str, str], status: int) -> None:
    results = [result("a", version=versions[0]), result("b", version=versions[1])]
    operation = Operation(verb="GetModelInfo", state=OPERATION_STATE_OK, targets=["a", "b"], stage_results=results)
    reply = replies.of_router(operation, "/model_info", str)
    assert (reply.status, reply.body["success"]) == (status, status == 200)
    assert status == 200 or "1, 2" in reply.body["message"]


@pytest.mark.parametrize(
    ("verb", "state"), [("PauseGeneration", OPERATION_STATE_OK), ("UpdateWeightsFromDisk", OPERATION_STATE_FAILED)]
)
def test_a_skip_is_no_success(verb: str, state: OperationState.ValueType) -> None:
    skipped = result("a", OUTCOME_SKIPPED)
    operation = Operation(verb=verb, state=state, targets=["a"], stage_results=[skipped])
    reply = replies.of_worker(operation, "a")
    [stage] = reply.body["results"]
    assert (reply.status, reply.body["success"], stage["success"]) == (501, False, False)
    assert (stage["data"]["skipped"], stage["data"]["unsupported"]) == (True, True)
    assert not any(rank["success"] for rank in stage["data"]["rank_results"])
    reply = replies.of_router(operation, f"/{verb}", str)
    assert (reply.status, reply.body["success"]) == (502, False)
    assert "it cannot" in reply.body["message"]


def test_a_continue_that_waits_for_memory_is_a_success() -> None:
    later = result("a", OUTCOME_SKIPPED)
    for error in (later.error, later.rank_results[0].error):
        error.CopyFrom(Reason.MEMORY_RELEASED.error("released: kv_cache").detail())
    operation = Operation(verb="ContinueGeneration", state=OPERATION_STATE_OK, targets=["a"], stage_results=[later])
    assert replies.of_router(operation, "/continue_generation", str).status == 200


@pytest.mark.parametrize("differs", ["", "missing", "unexpected", "changed"])
def test_matched_is_a_truth_value(differs: str) -> None:
    """As sglang-omni 0.1.9 has it (``model_runner/weight_checker.py``)."""
    report = CheckReport(action=CHECK_ACTION_COMPARE, matched=2, tensor_count=3)
    if differs:
        getattr(report, differs).append("model.norm.weight")
    checked = result("a")
    checked.rank_results[0].check.CopyFrom(report)
    operation = Operation(verb="CheckWeights", state=OPERATION_STATE_OK, targets=["a"], stage_results=[checked])
    [stage] = replies.of_worker(operation, "a").body["results"]
    for data in (stage["data"], stage["data"]["rank_results"][0]["data"]):
        assert data["matched"] is (not differs)
        assert [type(data[name]) for name in ("missing", "unexpected", "changed")] == [list] * 3


def test_fields_have_the_original_s_types() -> None:
    """As sglang-omni 0.1.9 has them (``proto/admin.py``): numbers of 64 bits are numbers, and zeros are there."""
    told = result("a")
    version = WeightVersion(label="1", sequence=7)
    told.rank_results[0].model_info.CopyFrom(
        ModelInfo(model_path="/m", local_parameters=1 << 40, weight_version=version)
    )
    operation = Operation(
        verb="GetModelInfo", operation_id="1", state=OPERATION_STATE_OK, targets=["a"], stage_results=[told]
    )
    body = replies.of_worker(operation, "a").body
    [stage] = body["results"]
    assert (body["op_id"], body["action"], stage["action"], stage["error"]) == ("1", "model_info", "model_info", None)
    data = stage["data"]["rank_results"][0]["data"]
    assert (data["local_parameters"], data["vocab_size"], data["weight_version"]) == (1 << 40, 0, "1")
    assert stage["data"]["engine_paused"] is False
    reply = replies.of_router(operation, "/model_info", str).body
    assert (reply["model_path"], reply["weight_version"], reply["workers"]) == ("/m", "1", reply["results"])
