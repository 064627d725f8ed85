"""Steps of an update that are sent without waiting in between: a later one does no harm when an earlier one fails."""

from __future__ import annotations

import pytest
from updating import abort, begin, commit, digest, fault, join, version_of, weights, write

from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_REJECTED
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK


@pytest.mark.parametrize("method", ["pause_generation", "prepare_update"])
async def test_a_stage_that_refuses_leaves_all_as_they_were(fleet: InProcessFleet, method: str) -> None:
    before = weights(fleet)
    fault(fleet, 0, 1, method, Reason.UNSUPPORTED.error("not this one", outcome=OUTCOME_REJECTED))
    plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT))
    await join(fleet, plan)
    assert (await write(fleet, plan, "w1")).state == OPERATION_STATE_FAILED
    fake_engine.FAULTS.clear()
    await abort(fleet, plan)
    assert weights(fleet) == before
    assert version_of(fleet) == ("initial", 1)
    for slot in "ab":
        stage = fleet.stage(slot)
        assert stage.routable, "what the update had paused or opened there is undone"
        assert (stage.report.update_id, stage.report.paused) == ("", False)


@pytest.mark.parametrize("pause", [common.PAUSE_MODE_RETRACT, common.PAUSE_MODE_IN_PLACE])
async def test_each_stage_carries_them_out_in_order(fleet: InProcessFleet, pause: int) -> None:
    seen: list[str] = []

    async def note(engine: FakeEngine, name: str, call: Call) -> None:
        if engine.config.tp_size == 1:
            seen.append(name)

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = note
    plan = await begin(fleet, options=v.UpdateOptions(pause=pause))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    assert (await commit(fleet, plan, digest("w1"))).state == OPERATION_STATE_OK
    again = ["pause_generation"] if pause == common.PAUSE_MODE_IN_PLACE else []
    steps = [name for name in seen if name not in ("init_weights_update_group", "get_model_info")]
    assert steps == [
        "pause_generation",
        "prepare_update",
        "update_weights_from_distributed",
        *again,
        "commit_update",
        "flush_cache",
        "check_weights",
        "continue_generation",
    ]


@pytest.mark.parametrize("pause", [common.PAUSE_MODE_RETRACT, common.PAUSE_MODE_IN_PLACE])
async def test_a_flush_beside_a_commit_that_fails_changes_nothing_of_the_outcome(
    fleet: InProcessFleet, pause: int
) -> None:
    fault(fleet, 0, 1, "commit_update", Reason.WEIGHTS_INCOMPLETE.error("one is missing", outcome=OUTCOME_REJECTED))
    plan = await begin(fleet, options=v.UpdateOptions(pause=pause))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    operation = await commit(fleet, plan, digest("w1"))
    fake_engine.FAULTS.clear()
    assert operation.state == OPERATION_STATE_FAILED
    assert version_of(fleet) == ("initial", 1)
    results = {result.slot: result for result in operation.stage_results}
    assert results["a"].error.reason == "WEIGHTS_INCOMPLETE"
    assert {fleet.stage(slot).state for slot in "ab"} == {common.STAGE_STATE_DIRTY}
    again = await begin(fleet, "step-2")
    await join(fleet, again)
    await write(fleet, again, "w2")
    assert (await commit(fleet, again, digest("w2"))).state == OPERATION_STATE_OK
    assert all(fleet.stage(slot).routable for slot in "ab")
