"""Failures that users of other systems had: transfers that did not happen, groups that did not stand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from updating import begin, commit, digest, fault, generate, join, refusal, restart, update, version_of, weights, write

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK
from rlctl.weights.shared_memory.posix import open_memory
from rlctl.weights.shared_memory.segment import from_proto
from rlctl.weights.shared_memory.sender import SegmentSender
from rlctl.weights.tensor.source import as_source


async def test_incident_04_a_distributed_update_that_failed_resumes_nobody(fleet: InProcessFleet) -> None:
    plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT))
    await join(fleet, plan)
    broken = Reason.GROUP_FAILED.error("connection reset", outcome=common.OUTCOME_DIRTY)
    await write(fleet, plan, "half")
    fault(fleet, 0, 1, "update_weights_from_distributed", broken)
    await write(fleet, plan, "rest")
    fake_engine.FAULTS.clear()
    assert (await commit(fleet, plan, digest("rest"))).state == OPERATION_STATE_FAILED
    for slot in "ab":
        assert fleet.stage(slot).state == common.STAGE_STATE_DIRTY
    resumed = await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())
    assert resumed.state == OPERATION_STATE_FAILED
    assert {result.outcome for result in resumed.stage_results} == {common.OUTCOME_REJECTED}
    assert (await refusal(generate(fleet, "a"))).reason is Reason.STAGE_NOT_SERVING
    await update(fleet, "whole")
    assert all(fleet.stage(slot).routable for slot in "ab"), "and no restart is needed"


async def test_incident_04_a_rendezvous_that_hangs_costs_its_deadline_and_the_engine_is_not_stuck_in_it(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_group = FakeEngine.init_weights_update_group
    never = asyncio.Event()

    async def hang(engine: FakeEngine, request: Any, call: Call) -> Any:
        if engine.config.tp_size == 1 and not request.probe_only:
            await never.wait()
        return await join_group(engine, request, call)

    monkeypatch.setattr(FakeEngine, "init_weights_update_group", hang)
    plan = await begin(fleet)
    stuck = await join(fleet, plan, header=header(plan, timeout_s=0.5))
    assert stuck.state != OPERATION_STATE_OK
    monkeypatch.undo()
    paused = await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header(plan)))
    assert paused.state == OPERATION_STATE_OK, "other verbs do not wait for it"
    never.set()


def header(plan: u.BeginWeightUpdateResponse, timeout_s: float = 0.0) -> RequestHeader:
    timeout = duration(timeout_s) if timeout_s else None
    return RequestHeader(fence=common.Fence(update_id=plan.update_id), timeout=timeout)


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_incidents_05_and_06_a_transfer_that_moved_nothing_is_not_believed(
    fleet: InProcessFleet, tp_size: int
) -> None:
    async def lose(engine: FakeEngine, name: str, call: Call) -> None:
        # One rank says that it took everything in, and holds what memory held.
        if name == "commit_update" and engine.config.tp_size == tp_size:
            engine.weights = "uninitialised"

    rank = tp_size - 1
    fake_engine.FAULTS[fleet.specs[0].model_path, rank] = lose
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    operation = await commit(fleet, plan, digest("w1"))
    assert operation.state == OPERATION_STATE_FAILED
    wrong = next(result for result in operation.stage_results if len(result.rank_results) == tp_size)
    assert wrong.error.reason == "DIGEST_MISMATCH"
    assert version_of(fleet) == ("initial", 1), "the version is stamped last, and on nobody's word alone"
    assert not any(fleet.stage(slot).routable for slot in "ab")


async def test_incident_13_the_group_of_a_restarted_engine_is_a_new_one(fleet: InProcessFleet) -> None:
    await update(fleet, "w1")
    before = fleet.stages["a"]._engine._groups.copy()
    await restart(fleet, "b")
    await fleet.until(lambda stages: len(stages) == 2 and stages[1].incarnation == 2)
    plan = await begin(fleet, "step-2")
    (group,) = plan.groups
    assert group.group_name not in before
    assert not group.formed
    await join(fleet, plan)
    await write(fleet, plan, "w2")
    assert (await commit(fleet, plan, digest("w2"))).state == OPERATION_STATE_OK
    standing = {name for stage in fleet.stages.values() for name in stage._engine._groups}
    assert standing == {group.group_name}, "nobody is left in the old one"


async def test_incident_14_ranks_and_world_size_come_from_the_roster_whatever_the_layouts(
    make_fleet: Callable[..., Any],
) -> None:
    async with make_fleet(a=2, b=1, c=4) as fleet:
        plan = await begin(fleet)
        (group,) = plan.groups
        assert group.world_size == 1 + 2 + 1 + 4
        operation = await join(fleet, plan)
        ranks = [rank.group.group_rank for stage in operation.stage_results for rank in stage.rank_results]
        assert sorted(ranks) == list(range(1, 8)), "each joins once, none is counted by its tensor-parallel size"
        wrong = await join(fleet, plan, world_size=4)
        assert (wrong.error.reason, wrong.error.field) == ("FIELD_INVALID", "world_size")


async def test_incident_15_several_sources_meet_every_engine_in_one_order(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: dict[tuple[int, int], list[str]] = {}
    take_in = FakeEngine.update_weights_from_distributed

    async def note(engine: FakeEngine, request: Any, call: Call) -> Any:
        seen = orders.setdefault((engine.config.tp_size, engine.config.rank), [])
        seen += [bucket.group_name or request.group_name for bucket in request.buckets]
        return await take_in(engine, request, call)

    monkeypatch.setattr(FakeEngine, "update_weights_from_distributed", note)
    plan = await begin(fleet, num_sources=3)
    names = [group.group_name for group in plan.groups]
    assert len(set(names)) == 3
    for group in reversed(plan.groups):  # the sources come in any order
        await join(fleet, plan, group_name=group.group_name, world_size=group.world_size)
    buckets = [
        v.TensorBucket(names=[f"t{n}-{name}"], dtypes=["torch.float32"], shapes=[v.Shape()], group_name=name)
        for n in range(4)
        for name in names
    ]
    request = v.UpdateWeightsFromDistributedRequest(header=header(plan), group_name=names[0], buckets=buckets)
    assert (await fleet.stub.UpdateWeightsFromDistributed(request)).state == OPERATION_STATE_OK
    assert set(map(tuple, orders.values())) == {tuple(names * 4)}
    assert set(orders) == {(1, 0), (2, 0), (2, 1)}
    text = ",".join(bucket.names[0] for bucket in buckets)
    assert (await commit(fleet, plan, digest(text))).state == OPERATION_STATE_OK
    assert set(weights(fleet)) == {text}


def test_incident_25_a_shared_buffer_is_written_again_only_after_every_receiver_is_done() -> None:
    full = {f"w{n}": torch.full((1000,), n, dtype=torch.uint8) for n in range(2)}
    source = as_source(full.items())
    sender = SegmentSender(segment_bytes=1000, segments=1)
    try:
        sent = sender.write(source, source.metas())
        first = next(sent)
        (segment,) = [from_proto(message, "segment") for message in first.messages]
        memory = open_memory(segment.header, segment.size, "name", "size").data
        (meta, at) = segment.tensors[0]
        reading = memory[at : at + meta.nbytes]
        following: list[object] = []
        writer = threading.Thread(target=lambda: following.append(next(sent)))
        writer.start()
        writer.join(0.3)
        assert not following, "there is one segment, and its receiver has not said that it is done"
        assert bool((reading == 0).all())
        first.release()
        writer.join(10)
        assert following
        assert bool((reading == 1).all())
    finally:
        sender.close()
