"""The timeline of an update: every phase, with the time of each stage and the bytes of each rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from updating import Held, begin, commit, digest, join, write

from rlctl.contract.durations import seconds
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, TRANSPORT_DISK, TRANSPORT_TORCH_GLOO
from rlctl.v1.coordinator_pb2 import GetOperationRequest, ListOperationsRequest
from rlctl.v1.results_pb2 import (
    PHASE_KIND_ABORT,
    PHASE_KIND_ADMIT,
    PHASE_KIND_APPLY,
    PHASE_KIND_PAUSE,
    PHASE_KIND_PREPARE,
    PHASE_KIND_PUBLISH,
    PHASE_KIND_RESUME,
    PHASE_KIND_TRANSFER,
    PHASE_KIND_VERIFY,
    Phase,
    PhaseKind,
)
from rlctl.v1.verbs_pb2 import UpdateWeightsFromDiskRequest

IN_PLACE = [
    PHASE_KIND_PAUSE,
    PHASE_KIND_PREPARE,
    PHASE_KIND_TRANSFER,
    PHASE_KIND_APPLY,
    PHASE_KIND_VERIFY,
    PHASE_KIND_PUBLISH,
    PHASE_KIND_ADMIT,
    PHASE_KIND_RESUME,
]


async def phases(fleet: InProcessFleet, operation_id: str) -> list[Phase]:
    operation = await fleet.stub.GetOperation(GetOperationRequest(operation_id=operation_id))
    return list(operation.timeline.phases)


def kinds(phases: list[Phase]) -> list[PhaseKind.ValueType]:
    return [phase.kind for phase in phases]


async def test_an_update_has_its_phases_by_stage_and_rank(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1", "w2")
    answer = await commit(fleet, plan, digest("w1,w2"))
    assert not answer.HasField("timeline"), "only GetOperation sends it"
    found = await phases(fleet, plan.update_id)
    assert sorted(kinds(found)) == sorted(IN_PLACE)
    by_kind = {phase.kind: phase for phase in found}
    transfer = by_kind[PHASE_KIND_TRANSFER]
    assert {stage.slot: stage.transport for stage in transfer.stages} == dict.fromkeys("ab", TRANSPORT_TORCH_GLOO)
    assert {stage.slot: [rank.rank for rank in stage.ranks] for stage in transfer.stages} == {"a": [0], "b": [0, 1]}
    starts = [seconds(by_kind[kind].start) for kind in IN_PLACE[2:]]
    assert starts == sorted(starts)
    for phase in found:
        for stage in phase.stages:
            assert stage.outcome == OUTCOME_APPLIED
            assert 0 < seconds(stage.duration) <= seconds(phase.duration)
    assert not by_kind[PHASE_KIND_PUBLISH].stages
    listed = await fleet.stub.ListOperations(ListOperationsRequest())
    assert not any(operation.HasField("timeline") for operation in listed.operations)


async def test_a_running_update_shows_the_phases_until_now(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    assert await phases(fleet, plan.update_id) == []
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    assert sorted(kinds(await phases(fleet, plan.update_id))) == sorted(IN_PLACE[:3])
    await write(fleet, plan, "w2")
    found = await phases(fleet, plan.update_id)
    assert {phase.kind: phase.steps for phase in found}[PHASE_KIND_TRANSFER] == 2
    await commit(fleet, plan, digest("w1,w2"))
    assert (await phases(fleet, plan.update_id))[: len(found)] == found, "asking changes nothing"


async def test_a_phase_that_runs_says_so_and_who_has_answered(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    held = Held(fleet, "update_weights_from_distributed")
    writing = asyncio.ensure_future(write(fleet, plan, "w1"))
    await held.begun.wait()

    async def transfer() -> Phase:
        (phase,) = [each for each in await phases(fleet, plan.update_id) if each.kind == PHASE_KIND_TRANSFER]
        return phase

    async with asyncio.timeout(5):
        while [stage.slot for stage in (await transfer()).stages] != ["b"]:  # noqa: ASYNC110 - a result has no event
            await asyncio.sleep(0.01)
    assert (await transfer()).running
    held.may_end.set()
    await writing
    ended = await transfer()
    assert not ended.running
    assert {stage.slot for stage in ended.stages} == {"a", "b"}


async def test_an_update_from_disk_says_what_was_read(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    request = UpdateWeightsFromDiskRequest(model_path=checkpoint("other"))
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    found = await phases(fleet, operation.operation_id)
    (transfer,) = [phase for phase in found if phase.kind == PHASE_KIND_TRANSFER]
    assert {stage.transport for stage in transfer.stages} == {TRANSPORT_DISK}
    assert [rank.bytes for stage in transfer.stages for rank in stage.ranks] == [len("other")] * 3


async def test_a_failed_update_ends_with_the_abort(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    await commit(fleet, plan, digest("other"))
    found = await phases(fleet, plan.update_id)
    assert kinds(found)[-1] == PHASE_KIND_ABORT
    assert not {PHASE_KIND_ADMIT, PHASE_KIND_RESUME} & {*kinds(found)}


async def test_a_timeline_survives_the_coordinator(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    await commit(fleet, plan, digest("w1"))
    before = await phases(fleet, plan.update_id)
    await fleet.channel.close()
    await fleet.server.stop()
    await fleet.start_coordinator(fleet.server.address)
    assert await phases(fleet, plan.update_id) == before


async def test_each_batch_of_a_rolling_update_has_phases_of_its_own(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    request = UpdateWeightsFromDiskRequest(model_path=checkpoint("other"), max_unavailable=1)
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    found = await phases(fleet, operation.operation_id)
    transfers = [[stage.slot for stage in phase.stages] for phase in found if phase.kind == PHASE_KIND_TRANSFER]
    assert transfers == [["a"], ["b"]]
    assert kinds(found).count(PHASE_KIND_PUBLISH) == 2
