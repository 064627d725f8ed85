"""Groups that no update uses any more are left: nothing of them stays at an engine."""

from __future__ import annotations

import asyncio
from collections.abc import KeysView
from typing import Any

import pytest
from updating import abort, begin, commit, digest, fault, join, refusal, version_of, weights, write

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason
from rlctl.engine import Call
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, OPERATION_STATE_UNKNOWN, Operation


def groups(fleet: InProcessFleet) -> list[KeysView[str]]:
    """The groups that each rank's engine is in."""
    ranks = [*fleet.stages.values(), *(worker._follower for worker in fleet.workers.values())]
    return [rank._engine._groups.keys() for rank in ranks]  # type: ignore[attr-defined]


async def update(fleet: InProcessFleet, label: str, trainer: str = "first") -> str:
    """A whole update by a trainer process; returns its group's name."""
    request = u.BeginWeightUpdateRequest(model="actor", version=label, trainer=u.Trainer(boot_id=trainer))
    plan = await fleet.stub.BeginWeightUpdate(request)
    if not plan.groups[0].formed:
        await join(fleet, plan)
    await write(fleet, plan, label)
    assert (await commit(fleet, plan, digest(label))).state == OPERATION_STATE_OK
    name: str = plan.groups[0].group_name
    return name


async def test_a_trainer_that_takes_over_leaves_the_groups_of_the_one_before(fleet: InProcessFleet) -> None:
    first = await update(fleet, "one")
    assert groups(fleet) == [{first}] * 3
    second = await update(fleet, "two", "second")
    assert groups(fleet) == [{second}] * 3
    assert list(fleet.server.coordinator.roster.models["actor"].record.groups) == [second]


async def test_an_update_that_is_refused_when_its_groups_are_planned_forgets_none(fleet: InProcessFleet) -> None:
    await update(fleet, "one")
    journal = fleet.server.coordinator._journal
    write_through = journal.write

    async def refuse(changes: object) -> None:
        raise Reason.JOURNAL_FAILED.error("no space is left")

    journal.write = refuse  # type: ignore[method-assign]
    request = u.BeginWeightUpdateRequest(model="actor", version="two", trainer=u.Trainer(boot_id="second"))
    assert (await refusal(fleet.stub.BeginWeightUpdate(request))).reason is Reason.JOURNAL_FAILED
    journal.write = write_through  # type: ignore[method-assign]
    assert groups(fleet) == [{await update(fleet, "two", "second")}] * 3


async def test_a_coordinator_that_was_restarted_leaves_the_groups_of_the_one_before(fleet: InProcessFleet) -> None:
    first = await update(fleet, "one")
    await fleet.channel.close()
    await fleet.server.stop()
    await fleet.start_coordinator(fleet.server.address)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    second = await update(fleet, "two")
    assert second != first
    assert groups(fleet) == [{second}] * 3


async def test_a_group_that_a_rank_did_not_leave_is_left_by_the_next_update(fleet: InProcessFleet) -> None:
    first = await update(fleet, "one")
    leave = FakeEngine.destroy_weights_update_group

    async def fail(self: FakeEngine, request: v.DestroyWeightsUpdateGroupRequest, call: Call) -> None:
        if self.config.rank == 1:
            raise Reason.DEADLINE_EXCEEDED.error("busy")
        await leave(self, request, call)

    FakeEngine.destroy_weights_update_group = fail  # type: ignore[method-assign]
    try:
        second = await update(fleet, "two", "second")
    finally:
        FakeEngine.destroy_weights_update_group = leave  # type: ignore[method-assign]
    assert groups(fleet) == [{second}, {second}, {first, second}]
    assert await update(fleet, "three", "second") == second
    assert groups(fleet) == [{second}] * 3


async def test_an_update_that_nobody_joined_leaves_nothing_behind(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await abort(fleet, plan)
    assert groups(fleet) == [set()] * 3
    assert not fleet.server.coordinator.roster.models["actor"].record.groups


async def test_the_lease_is_watched_while_a_stage_does_not_leave_its_groups(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await update(fleet, "one")
    never = asyncio.Event()
    leave = FakeEngine.destroy_weights_update_group

    async def hang(engine: FakeEngine, request: v.DestroyWeightsUpdateGroupRequest, call: Call) -> None:
        if request.group_name == first:
            await never.wait()
        await leave(engine, request, call)

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "destroy_weights_update_group", hang)
        trainer = u.Trainer(boot_id="second")
        request = u.BeginWeightUpdateRequest(model="actor", version="two", trainer=trainer, lease_ttl=duration(1.0))
        plan = await fleet.stub.BeginWeightUpdate(request)
        async with asyncio.timeout(5.0):
            await fleet.server.coordinator.operations.get(plan.update_id).ended.wait()
    ended = fleet.server.coordinator.operations.get(plan.update_id).operation
    assert ended.error.reason == "LEASE_EXPIRED"
    never.set()
    # What could not be left is left by the next one.
    assert groups(fleet) == [{await update(fleet, "three", "third")}] * 3


async def test_an_update_that_a_running_operation_keeps_out_reserves_nothing(fleet: InProcessFleet) -> None:
    engine, flushing, held = fleet.stages["a"]._engine, asyncio.Event(), asyncio.Event()
    flush = engine.flush_cache

    async def slowly(*args: object) -> object:
        flushing.set()
        await held.wait()
        return await flush(*args)

    engine.flush_cache = slowly
    running = asyncio.ensure_future(fleet.stub.FlushCache(v.FlushCacheRequest()))
    await flushing.wait()
    model, journal = fleet.server.coordinator.roster.models["actor"], fleet.server.coordinator._journal
    before = model.record.SerializeToString(deterministic=True)
    assert (await refusal(begin(fleet))).reason is Reason.OPERATION_CONFLICT
    assert model.record.SerializeToString(deterministic=True) == before
    assert list(journal.read("update")) == []
    held.set()
    assert (await running).state == OPERATION_STATE_OK


NCCL, GLOO = common.TRANSPORT_TORCH_NCCL, common.TRANSPORT_TORCH_GLOO
VLLM = common.TRANSPORT_VLLM_NCCL


def offers(fleet: InProcessFleet, slot: str, *transports: common.Transport.ValueType) -> None:
    fleet.server.coordinator.roster.slots[slot].record.registration.capabilities.transports[:] = transports


async def join_all(fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse) -> list[list[str]]:
    """Who joined each group that does not stand yet."""
    operations = [
        await join(fleet, plan, group_name=group.group_name, world_size=group.world_size, backend=group.backend)
        for group in plan.groups
        if not group.formed
    ]
    return [list(operation.targets) for operation in operations]


async def write_over(fleet: InProcessFleet, plan: u.BeginWeightUpdateResponse, name: str, text: str) -> Operation:
    bucket = v.TensorBucket(names=[text], dtypes=["torch.float32"], shapes=[v.Shape()], group_name=name)
    request = v.UpdateWeightsFromDistributedRequest(buckets=[bucket])
    request.header.fence.update_id = plan.update_id
    return await fleet.stub.UpdateWeightsFromDistributed(request)


async def test_each_target_is_fed_by_the_first_transport_that_it_offers(fleet: InProcessFleet) -> None:
    offers(fleet, "a", GLOO, NCCL)
    offers(fleet, "b", GLOO)
    for label in ("one", "two"):
        plan = await begin(fleet, label, transports=[NCCL, GLOO])
        assert {target.slot: target.transport for target in plan.targets} == {"a": NCCL, "b": GLOO}
        groups_of = {group.backend: group for group in plan.groups}
        assert [[m.slot for m in groups_of[backend].members] for backend in ("nccl", "gloo")] == [["a"], ["b"]]
        assert [groups_of[backend].world_size for backend in ("nccl", "gloo")] == [2, 3]
        joined = await join_all(fleet, plan)
        assert joined == ([["a"], ["b"]] if label == "one" else [])
        written = await asyncio.gather(*(write_over(fleet, plan, group.group_name, label) for group in plan.groups))
        assert [list(operation.targets) for operation in written] == [["a"], ["b"]]
        assert (await commit(fleet, plan, digest(label))).state == OPERATION_STATE_OK
        assert weights(fleet) == [label] * 3


async def test_targets_of_one_transport_do_not_wait_for_those_of_another(fleet: InProcessFleet) -> None:
    offers(fleet, "a", NCCL)
    offers(fleet, "b", GLOO)
    plan = await begin(fleet, "one", transports=[NCCL, GLOO])
    await join_all(fleet, plan)
    first, second = plan.groups
    stuck = asyncio.create_task(write_over(fleet, plan, first.group_name, "stuck"))
    await write_over(fleet, plan, second.group_name, "one")
    assert not stuck.done()
    # Whoever fails leaves its own group; in the other one nobody is told to.
    await abort(fleet, plan)
    assert (await stuck).state != OPERATION_STATE_OK
    assert version_of(fleet) == ("initial", 1)


async def test_what_vllms_own_engine_feeds_is_fed_alone(fleet: InProcessFleet) -> None:
    """Nothing gets its ranks out of a broadcast that those of another server do not come to."""
    for slot in "ab":
        offers(fleet, slot, VLLM)
    for label in ("one", "two"):
        plan = await begin(fleet, label, transports=[VLLM])
        assert [group.backend for group in plan.groups] == ["vllm_nccl"] * 2
        assert [{member.slot for member in group.members} for group in plan.groups] == [{"a"}, {"b"}]
        assert [group.world_size for group in plan.groups] == [2, 3]
        assert await join_all(fleet, plan) == ([["a"], ["b"]] if label == "one" else [])
        written = await asyncio.gather(*(write_over(fleet, plan, group.group_name, label) for group in plan.groups))
        assert [list(operation.targets) for operation in written] == [["a"], ["b"]]
        assert (await commit(fleet, plan, digest(label))).state == OPERATION_STATE_OK
        assert weights(fleet) == [label] * 3
    plan = await begin(fleet, "three", transports=[VLLM])
    first, second = plan.groups
    stuck = asyncio.create_task(write_over(fleet, plan, first.group_name, "stuck"))
    await write_over(fleet, plan, second.group_name, "three")
    assert not stuck.done()
    await abort(fleet, plan)
    assert (await stuck).state != OPERATION_STATE_OK


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"num_sources": 2}, "num_sources"), ({"kind": v.UPDATE_KIND_PARTIAL}, "kind")],
)
async def test_what_vllms_own_engine_does_not_take_is_refused_at_the_begin(
    fleet: InProcessFleet, settings: dict[str, Any], field: str
) -> None:
    offers(fleet, "b", VLLM)
    offers(fleet, "a", GLOO)
    error = await refusal(begin(fleet, transports=[VLLM, GLOO], **settings))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, field)
    assert "b: vLLM's own engine takes" in error.message
    assert not any(fleet.stage(slot).report.paused for slot in "ab")


async def test_a_target_that_offers_none_of_the_transports_is_refused_by_name(fleet: InProcessFleet) -> None:
    offers(fleet, "a", common.TRANSPORT_DISK)
    offers(fleet, "b", GLOO)
    error = await refusal(begin(fleet, transports=[NCCL, GLOO]))
    assert (error.reason, error.field, error.message) == (
        Reason.UNSUPPORTED,
        "transports",
        "a joins no nccl or gloo group",
    )


@pytest.mark.parametrize("probed", [True, False])
async def test_no_stage_has_joined_a_group_that_was_not_formed(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch, probed: bool
) -> None:
    init = FakeEngine.init_weights_update_group

    async def fail(engine: FakeEngine, request: v.InitWeightsUpdateGroupRequest, call: Call) -> Any:
        if engine.config.rank == 1 and request.probe_only == probed:
            raise Reason.GROUP_FAILED.error("no way to the store")
        return await init(engine, request, call)

    monkeypatch.setattr(FakeEngine, "init_weights_update_group", fail)
    plan = await begin(fleet)
    joined = await join(fleet, plan)
    assert joined.state == OPERATION_STATE_FAILED
    assert "b: rank 1: no way to the store" in joined.error.message
    of_a = next(result for result in joined.stage_results if result.slot == "a")
    assert (of_a.outcome, of_a.error.reason) == (common.OUTCOME_REJECTED, "CANCELLED")
    assert "the group was not formed: b did not join" in of_a.error.message
    assert {rank.outcome for rank in of_a.rank_results} == {common.OUTCOME_REJECTED}
    assert groups(fleet) == [set()] * 3
    await abort(fleet, plan)


async def test_a_stage_that_does_not_leave_a_group_that_was_not_formed_says_so(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    init, leave = FakeEngine.init_weights_update_group, FakeEngine.destroy_weights_update_group

    async def fail(engine: FakeEngine, request: v.InitWeightsUpdateGroupRequest, call: Call) -> Any:
        if engine.config.rank == 1 and not request.probe_only:
            raise Reason.GROUP_FAILED.error("no way to the store")
        return await init(engine, request, call)

    async def stay(engine: FakeEngine, request: v.DestroyWeightsUpdateGroupRequest, call: Call) -> None:
        if engine.config.tp_size == 1:
            raise Reason.ENGINE_FAILED.error("stuck")
        await leave(engine, request, call)

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "init_weights_update_group", fail)
        patch.setattr(FakeEngine, "destroy_weights_update_group", stay)
        plan = await begin(fleet)
        joined = await join(fleet, plan)
    assert joined.state == OPERATION_STATE_UNKNOWN
    of_a = next(result for result in joined.stage_results if result.slot == "a")
    assert {of_a.outcome, *(rank.outcome for rank in of_a.rank_results)} == {common.OUTCOME_UNKNOWN}
    assert "the stage may still be in the group: stuck" in of_a.error.message
    await abort(fleet, plan)


async def test_an_abort_after_which_a_stage_does_not_continue_says_so(fleet: InProcessFleet) -> None:
    plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT))
    await join(fleet, plan)
    fault(fleet, 0, 1, "continue_generation", Reason.ENGINE_FAILED.error("stuck"))
    fault(fleet, 1, 2, "prepare_update", Reason.ENGINE_FAILED.error("no room"))
    await write(fleet, plan, "one")
    aborted = await abort(fleet, plan)
    of_a = next(result for result in aborted.stage_results if result.slot == "a")
    assert of_a.state == common.STAGE_STATE_PAUSED
    assert "the stage did not continue generation: stuck" in of_a.error.message
