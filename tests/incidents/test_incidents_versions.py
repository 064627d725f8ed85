"""Failures that users of other systems had: which version is served, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from updating import (
    abort,
    begin,
    commit,
    digest,
    fault,
    from_disk,
    generate,
    join,
    refusal,
    restart,
    update,
    version_of,
    weights,
    write,
)

from rlctl.contract.errors import Reason
from rlctl.testing import fake_engine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.coordinator_pb2 import HealStageRequest
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, OPERATION_STATE_PARTIAL

Checkpoint = Callable[[str], str]


async def test_incident_01_a_recovered_engine_takes_no_traffic_before_it_has_the_current_weights(
    make_fleet: Callable[..., Any], checkpoint: Checkpoint
) -> None:
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        await from_disk(fleet, checkpoint("w1"))
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        assert fleet.stages["a"]._engine.weights == "one", "it came back with the weights of its launch"
        assert (await refusal(generate(fleet, "a"))).reason is Reason.STAGE_NOT_SERVING
        healed = await fleet.stub.HealStage(HealStageRequest(slots=["a"]))
        assert healed.state == OPERATION_STATE_OK, healed.error
        sample = await generate(fleet, "a")
        assert [span.version.sequence for span in sample.versions] == [2]
        assert set(weights(fleet)) == {"w1"}


async def test_incident_02_a_published_version_does_not_go_backwards_after_a_failover(fleet: InProcessFleet) -> None:
    for text in ("w1", "w2"):
        await update(fleet, text)
    assert version_of(fleet)[1] == 3
    address = fleet.server.address
    await fleet.channel.close()
    await fleet.server.stop()
    await fleet.start_coordinator(address)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    assert version_of(fleet)[1] == 3
    # What a staleness filter goes by: no stage serves less than was asked for, before and after the next version.
    assert (await refusal(generate(fleet, "a", min_version_seq=4))).reason is Reason.VERSION_TOO_OLD
    await update(fleet, "w3")
    assert version_of(fleet)[1] == 4
    assert [span.version.sequence for span in (await generate(fleet, "a", min_version_seq=4)).versions] == [4]


@pytest.mark.parametrize("quorum", [0, 1])
async def test_incident_07_no_version_is_published_after_a_chunk_that_failed(
    fleet: InProcessFleet, quorum: int
) -> None:
    # Of a partial update whose chunks nobody digests, nothing but the answers tells that one is missing.
    options = v.UpdateOptions(verify=common.VERIFICATION_LEVEL_NONE, quorum=quorum)
    plan = await begin(fleet, kind=v.UPDATE_KIND_PARTIAL, options=options)
    await join(fleet, plan)
    await write(fleet, plan, "first")
    fault(fleet, 1, 2, "update_weights_from_distributed", Reason.GROUP_FAILED.error("the connection broke"))
    second = await write(fleet, plan, "second")
    assert second.state == (OPERATION_STATE_PARTIAL if quorum else second.state)
    fake_engine.FAULTS.clear()
    operation = await commit(fleet, plan)
    assert fleet.stage("b").state == common.STAGE_STATE_DIRTY
    assert (await refusal(generate(fleet, "b"))).reason is Reason.STAGE_NOT_SERVING
    if quorum:
        assert operation.state == OPERATION_STATE_PARTIAL
        assert [result.outcome for result in operation.stage_results] == [common.OUTCOME_APPLIED, common.OUTCOME_DIRTY]
        assert not fleet.stage("b").routable
        assert (await generate(fleet, "a", min_version_seq=2)).output_ids
    else:
        assert operation.state == OPERATION_STATE_FAILED
        assert version_of(fleet) == ("initial", 1)
        assert (await refusal(generate(fleet, "a"))).reason is Reason.STAGE_NOT_SERVING


async def test_incident_17_a_trainer_that_resumes_from_an_older_checkpoint_neither_serves_it_nor_blocks_rollouts(
    fleet: InProcessFleet,
) -> None:
    older = u.Trainer(name="trainer", boot_id="first", incarnation=1)
    newer = u.Trainer(name="trainer", boot_id="second", incarnation=2)
    await update(fleet, "w1", trainer=older)
    await update(fleet, "w2", trainer=older)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    assert version_of(fleet)[1] == 3, "what is served meanwhile is the latest version, not the trainer's checkpoint"
    # It begins again from what it had after the first step, and may use its label again.
    await update(fleet, "w1", trainer=newer)
    assert version_of(fleet)[1] == 4
    assert set(weights(fleet)) == {"w1"}
    assert (await generate(fleet, "b", min_version_seq=4)).output_ids
    request = u.BeginWeightUpdateRequest(model="actor", version="late", trainer=older)
    assert (await refusal(fleet.stub.BeginWeightUpdate(request))).reason is Reason.TRAINER_FENCED


async def test_incident_26_weights_that_were_released_are_not_served_before_they_were_written(
    fleet: InProcessFleet,
) -> None:
    await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    await fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest())
    early = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert {result.error.reason for result in early.stage_results} == {"MEMORY_RELEASED"}
    await fleet.stub.ResumeMemory(v.ResumeMemoryRequest())
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    for slot in "ab":
        assert (await refusal(generate(fleet, slot))).reason is Reason.STAGE_NOT_SERVING
    await update(fleet, "w1")
    assert set(weights(fleet)) == {"w1"}
    await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert [span.version.sequence for span in (await generate(fleet, "a")).versions] == [2]


@pytest.mark.parametrize("ends", ["commit", "abort"])
async def test_incident_17_an_update_of_the_former_trainer_changes_nothing_once_its_successor_is_there(
    fleet: InProcessFleet, ends: str
) -> None:
    plan = await begin(fleet, trainer=u.Trainer(name="trainer", boot_id="first", incarnation=1))
    await join(fleet, plan)
    await write(fleet, plan, "half")
    await update(fleet, "w1", trainer=u.Trainer(name="trainer", boot_id="second", incarnation=2))
    late = await (commit(fleet, plan, digest("half")) if ends == "commit" else abort(fleet, plan))
    assert late.state == OPERATION_STATE_FAILED
    assert set(weights(fleet)) == {"w1"}
    assert all(fleet.stage(slot).routable for slot in "ab")
