"""Updates of clients that name none: opened by their writes, committed by what ends them; calls that are one."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
from fleet_steps import end, engines, group, header
from journal_faults import MEANWHILE_S, at_write, full_disk
from updating import begin, digest, fault, refusal, version_of, weights
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations import collective_fanout
from rlctl.coordinator.operations.call_coalescing import Joined
from rlctl.coordinator.updates import implicit
from rlctl.engine import Call
from rlctl.ports import Put, new_uuid7
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet, StageSpec
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import coordinator_pb2 as rpc
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, RequestHeader, Target
from rlctl.v1.journal_pb2 import ModelRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_CANCELLED, OPERATION_STATE_FAILED, OPERATION_STATE_OK, Operation

DIRTY, PAUSED, READY = common.STAGE_STATE_DIRTY, common.STAGE_STATE_PAUSED, common.STAGE_STATE_READY


def taken(fleet: InProcessFleet) -> list[list[str]]:
    """What each rank took in since the group was formed, write by write."""
    return [engine.seen for engine in engines(fleet)]  # type: ignore[attr-defined]


def _record(engine: FakeEngine) -> None:
    seen: list[str] = []
    take_in = FakeEngine._take_in

    def record(text: str) -> None:
        seen.append(text)
        take_in(engine, text)

    engine.seen, engine._take_in = seen, record  # type: ignore[attr-defined, method-assign]


async def form(fleet: InProcessFleet, name: str = "slime-pp_0") -> None:
    for operation in await asyncio.gather(group(fleet, "b", 1, group_name=name), group(fleet, "a", 3, group_name=name)):
        assert operation.state == OPERATION_STATE_OK, operation.error
    for engine in engines(fleet):
        _record(engine)


async def write(fleet: InProcessFleet, *names: str, slot: str = "", key: str = "", **fields: object) -> Operation:
    bucket = v.TensorBucket(names=names, dtypes=["torch.float32"] * len(names), shapes=[v.Shape()] * len(names))
    defaults = {"group_name": "slime-pp_0", "options": v.UpdateOptions(flush_cache=False)}
    request = v.UpdateWeightsFromDistributedRequest(header=header(slot, key), buckets=[bucket], **defaults | fields)
    return await fleet.stub.UpdateWeightsFromDistributed(request)


async def pause(fleet: InProcessFleet, mode: str = "RETRACT") -> None:
    value = common.PauseMode.Value(f"PAUSE_MODE_{mode}")
    assert (await fleet.stub.PauseGeneration(v.PauseGenerationRequest(mode=value))).state == OPERATION_STATE_OK


async def go_on(fleet: InProcessFleet, *slots: str) -> Operation:
    request = v.ContinueGenerationRequest(header=RequestHeader(target=Target(slots=slots)))
    return await fleet.stub.ContinueGeneration(request)


async def operations(fleet: InProcessFleet, verb: str) -> list[Operation]:
    return list((await fleet.stub.ListOperations(rpc.ListOperationsRequest(verb=verb))).operations)


def states(fleet: InProcessFleet) -> list[object]:
    return [fleet.stage(slot).state for slot in "ab"]


async def test_a_continue_publishes_what_was_written_under_the_pause(fleet: InProcessFleet) -> None:
    await form(fleet)
    await pause(fleet)
    for name in ("w1", "w2"):
        assert (await write(fleet, name, weight_version="step-7")).state == OPERATION_STATE_OK
    assert version_of(fleet) == ("initial", 1), "whatever a bucket says, the version comes last"
    assert (await go_on(fleet)).state == OPERATION_STATE_OK
    assert version_of(fleet) == ("step-7", 2)
    assert taken(fleet) == [["w1", "w2"]] * 3
    assert states(fleet) == [READY, READY]
    [update] = await operations(fleet, "WeightUpdate")
    assert (update.state, len(update.stage_results)) == (OPERATION_STATE_OK, 2)
    assert {r.verified for r in update.stage_results} == {common.VERIFICATION_LEVEL_REPLICA}


async def test_calls_for_each_engine_are_one_operation(fleet: InProcessFleet) -> None:
    await form(fleet)
    [joined] = await operations(fleet, "InitWeightsUpdateGroup")
    ranks = {s.slot: [r.group.group_rank for r in s.rank_results] for s in joined.stage_results}
    assert ranks == {"a": [3], "b": [1, 2]}, "the offsets are the client's"
    await pause(fleet)
    first, second = await asyncio.gather(write(fleet, "w1", slot="a"), write(fleet, "w1", slot="b"))
    assert first.operation_id == second.operation_id
    assert list(first.targets) == ["a", "b"]
    late = await write(fleet, "w2", slot="a")
    assert (await write(fleet, "w2", slot="b")).operation_id == late.operation_id, "one after the other, too"
    ended = await asyncio.gather(go_on(fleet, "a"), go_on(fleet, "b"))
    assert [operation.state for operation in ended] == [OPERATION_STATE_OK] * 2
    assert version_of(fleet)[1] == 2
    assert taken(fleet) == [["w1", "w2"]] * 3
    assert len(await operations(fleet, "WeightUpdate")) == 1


async def test_a_repeat_is_answered_once_and_a_new_call_is_a_new_operation(fleet: InProcessFleet) -> None:
    await form(fleet)
    await pause(fleet)
    key = new_uuid7()
    first = await write(fleet, "w1", slot="a", key=key)
    joined = await write(fleet, "w1", slot="b", key=(other := new_uuid7()))
    for slot, used in (("a", key), ("b", other)):
        again = await write(fleet, "w1", slot=slot, key=used)
        assert (again.operation_id, again.replayed) == (first.operation_id, True)
    assert joined.operation_id == first.operation_id
    assert taken(fleet) == [["w1"]] * 3
    assert (await refusal(write(fleet, "w9", slot="a", key=key))).reason is Reason.REQUEST_ID_REUSED
    new = await write(fleet, "w1", slot="a")
    assert new.operation_id != first.operation_id
    assert taken(fleet) == [["w1", "w1"]] * 3


async def test_a_repeat_without_a_key_gets_the_answer_that_nobody_got(fleet: InProcessFleet) -> None:
    await form(fleet)
    await pause(fleet)
    held = asyncio.Event()
    entered = asyncio.Event()
    take = fleet.stages["a"]._engine.update_weights_from_distributed

    async def slowly(*args: object) -> object:
        entered.set()
        await held.wait()
        return await take(*args)

    fleet.stages["a"]._engine.update_weights_from_distributed = slowly
    lost = asyncio.ensure_future(write(fleet, "w1"))
    await entered.wait()
    lost.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await lost
    held.set()

    [running] = fleet.server.coordinator.operations.newest_first("UpdateWeightsFromDistributed", 0)
    await running.ended.wait()
    assert (await write(fleet, "w1")).state == OPERATION_STATE_OK
    assert len(await operations(fleet, "UpdateWeightsFromDistributed")) == 1
    assert taken(fleet) == [["w1"]] * 3


@pytest.mark.parametrize(("end_by", "label"), [("end", "step-1"), ("version", "step-2"), ("continue", "step-1")])
async def test_whatever_ends_it_first_commits(fleet: InProcessFleet, end_by: str, label: str) -> None:
    await form(fleet)
    await fleet.stub.BeginWeightUpdate(u.BeginWeightUpdateRequest(header=header("a"), implicit=True))
    await fleet.stub.BeginWeightUpdate(u.BeginWeightUpdateRequest(header=header("b"), implicit=True))
    await write(fleet, "w1", weight_version="step-1")
    match end_by:
        case "end":
            both = await asyncio.gather(end(fleet, "a"), end(fleet, "b"))
            assert both[0].operation_id == both[1].operation_id
        case "version":
            assert (await end(fleet, version="step-2")).state == OPERATION_STATE_OK
        case "continue":
            assert (await go_on(fleet)).state == OPERATION_STATE_OK
    assert version_of(fleet) == (label, 2)
    assert states(fleet) == [READY, READY]
    assert len(await operations(fleet, "WeightUpdate")) == 1


async def test_a_version_that_is_named_afterwards_is_the_same_version(fleet: InProcessFleet) -> None:
    await form(fleet)
    await pause(fleet)
    await write(fleet, "w1")
    assert (await end(fleet)).state == OPERATION_STATE_OK
    assert version_of(fleet)[1] == 2
    assert states(fleet) == [PAUSED, PAUSED], "the pause is its client's"
    named = await end(fleet, version="step-3")
    assert named.state == OPERATION_STATE_OK
    assert version_of(fleet) == ("step-3", 2)
    assert {r.weight_version.label for r in named.stage_results} == {"step-3"}
    assert [[rank.outcome for rank in r.rank_results] for r in named.stage_results] == [
        [OUTCOME_APPLIED],
        [OUTCOME_APPLIED] * 2,
    ]
    assert (await go_on(fleet)).state == OPERATION_STATE_OK
    assert states(fleet) == [READY, READY]
    refused = await refusal(end(fleet))
    assert refused.reason is Reason.UPDATE_NOT_FOUND


async def test_the_name_of_an_update_that_failed_is_given_to_no_other_version(fleet: InProcessFleet) -> None:
    await form(fleet)
    await pause(fleet)
    await write(fleet, "w1")
    fault(fleet, 1, 2, "update_weights_from_distributed", Reason.GROUP_FAILED.error("gone"))
    assert (await write(fleet, "w2")).state != OPERATION_STATE_OK
    await eventually(lambda: DIRTY in states(fleet))
    named = await end(fleet, version="step-3")
    assert (named.state, named.error.reason) == (OPERATION_STATE_FAILED, "WEIGHTS_DIRTY")
    assert version_of(fleet) == ("initial", 1)


async def test_a_call_that_comes_long_after_the_others_is_an_operation_of_its_own(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlctl.coordinator.operations.call_coalescing.JOINED_S", 0.0)
    await form(fleet)
    await write(fleet, "w1")
    first = await end(fleet, "a", version="x")
    await end(fleet, version="y")
    late = await end(fleet, "b", version="x")
    assert late.operation_id != first.operation_id
    assert version_of(fleet) == ("x", 2)


async def test_outside_of_a_pause_a_write_is_a_whole_update(fleet: InProcessFleet) -> None:
    await form(fleet)
    first, second = await asyncio.gather(*(write(fleet, "w1", slot=slot, weight_version="one-shot") for slot in "ab"))
    assert first.operation_id == second.operation_id
    assert first.state == OPERATION_STATE_OK, first.error
    assert first.verb == "UpdateWeightsFromDistributed"
    assert version_of(fleet) == ("one-shot", 2)
    assert weights(fleet) == ["w1"] * 3
    assert states(fleet) == [READY, READY]


async def test_a_checkpoint_that_every_engine_is_told_of_is_read_once(
    fleet: InProcessFleet, checkpoint: object
) -> None:
    path = checkpoint("two")  # type: ignore[operator]

    async def load(slot: str) -> Operation:
        request = v.UpdateWeightsFromDiskRequest(header=header(slot), model_path=path, weight_version="two")
        return await fleet.stub.UpdateWeightsFromDisk(request)

    first = await load("a")
    assert (await load("b")).operation_id == first.operation_id
    assert (first.state, version_of(fleet)) == (OPERATION_STATE_OK, ("two", 2))
    assert (await load("a")).operation_id != first.operation_id, "after its answer the same is asked for anew"


async def test_a_group_that_contradicts_the_roster_is_refused_with_both_numbers(fleet: InProcessFleet) -> None:
    wrong = await refusal(group(fleet, "a", 1, world_size=3))
    assert (wrong.reason, wrong.field) == (Reason.FIELD_INVALID, "world_size")
    assert "world_size is 3; one source and the ranks of 2 stages make 4" in wrong.message
    both = await asyncio.gather(group(fleet, "a", 2), group(fleet, "b", 2))
    assert {operation.state for operation in both} == {OPERATION_STATE_FAILED}
    assert both[0].error.field == "rank_offset"
    assert "begins at rank 2 of slime-pp_0; 1 comes next" in both[0].error.message


async def test_engines_that_are_told_different_stores_are_not_left_waiting(fleet: InProcessFleet) -> None:
    waiting = asyncio.ensure_future(group(fleet, "a", 1))
    await eventually(lambda: bool(fleet.server.coordinator.implicit._gathering._pending))
    other = await refusal(group(fleet, "b", 2, master_port=2))
    assert (other.reason, other.field) == (Reason.GROUP_EXISTS, "master_port")
    assert (await group(fleet, "b", 2)).state == OPERATION_STATE_OK
    assert (await waiting).state == OPERATION_STATE_OK


@pytest.mark.parametrize("slot", ["", "a"], ids=["the model", "each engine"])
async def test_a_trainer_that_was_started_anew_has_its_group_formed_anew(fleet: InProcessFleet, slot: str) -> None:
    """It forms a group of the name that it formed before, with another store, and says no word about the old one."""

    async def joined(port: int) -> list[Operation]:
        if slot:
            return await asyncio.gather(*(group(fleet, *at, master_port=port) for at in [("b", 1), ("a", 3)]))
        return [await group(fleet, "", 1, master_port=port)]

    for port in (1, 2):
        for operation in await joined(port):
            assert operation.state == OPERATION_STATE_OK, operation.error
        assert [engine._groups for engine in engines(fleet)] == [{"slime-pp_0": ("127.0.0.1", port)}] * 3
    for engine in engines(fleet):
        _record(engine)
    await write(fleet, "w1", weight_version="again")
    assert version_of(fleet) == ("again", 2)


async def test_a_group_that_an_engine_is_not_called_for_says_which(fleet: InProcessFleet) -> None:
    short = header("a")
    short.timeout.FromMilliseconds(50)
    missing = await refusal(group(fleet, "a", 1, header=short))
    assert missing.reason is Reason.GROUP_FAILED
    assert "no call for b within" in missing.message


@pytest.mark.parametrize("first", ["a", "b"])
async def test_an_engine_that_comes_in_the_place_of_another_while_a_group_gathers_begins_it_anew(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The world is of the same size then as at the first call, and so is what the calls ask for."""
    gathering = fleet.server.coordinator.implicit._gathering
    slots = fleet.server.coordinator.roster.slots
    gone = copy.copy(slots["b"])
    gone.name = "gone"
    monkeypatch.setattr(fleet.server.coordinator.implicit, "_targets", lambda model: [slots["a"], gone])
    waiting = asyncio.ensure_future(refusal(group(fleet, "a", 1)))
    await eventually(lambda: bool(gathering._pending))
    monkeypatch.undo()
    calls = [asyncio.ensure_future(group(fleet, first, {"a": 1, "b": 2}[first]))]
    error = await waiting
    assert (error.reason, error.field) == (Reason.GROUP_FAILED, "world_size")
    assert "the model's engines are a, b now, and were a, gone at the first call" in error.message
    if first == "a":  # it was a repeat of the call that is over: it is told so, too
        assert (await refusal(calls.pop())).message == error.message
        assert not gathering._pending
        calls.append(asyncio.ensure_future(group(fleet, "b", 2)))
    calls.append(asyncio.ensure_future(group(fleet, "a", 1)))
    for operation in await asyncio.gather(*calls):
        assert operation.state == OPERATION_STATE_OK, operation.error
    assert not gathering._pending


async def test_a_repeat_waits_on_when_the_first_call_leaves(fleet: InProcessFleet) -> None:
    gathering = fleet.server.coordinator.implicit._gathering
    first = asyncio.ensure_future(group(fleet, "a", 1))
    await eventually(lambda: bool(gathering._pending))
    (pending,) = gathering._pending.values()
    again = asyncio.ensure_future(group(fleet, "a", 1))
    await eventually(lambda: pending.callers["a"] == 2)
    first.cancel()
    await eventually(lambda: pending.callers["a"] == 1)
    for operation in await asyncio.gather(again, group(fleet, "b", 2)):
        assert operation.state == OPERATION_STATE_OK, operation.error


async def test_an_engine_that_is_not_there_keeps_no_group_waiting(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = fleet.server.coordinator.roster.slots["b"]
    monkeypatch.setattr(fleet.server.coordinator.implicit, "_targets", lambda model: [there])
    waiting = asyncio.ensure_future(group(fleet, "b", 1, world_size=3))  # alone with the source, it waits for nobody
    error = await refusal(group(fleet, "a", 1, world_size=3))
    assert (error.reason, "there is no link to a" in error.message) == (Reason.UNREACHABLE, True)
    assert (await waiting).state == OPERATION_STATE_OK


async def test_a_group_that_was_answered_is_formed_anew_when_asked_for_again(fleet: InProcessFleet) -> None:
    await form(fleet)
    for slot in "ab":
        await fleet.stub.DestroyWeightsUpdateGroup(
            v.DestroyWeightsUpdateGroupRequest(
                header=RequestHeader(target=Target(slots=[slot])), group_name="slime-pp_0"
            )
        )
    await form(fleet)
    assert len(await operations(fleet, "InitWeightsUpdateGroup")) == 2


async def test_who_leaves_while_a_group_gathers_joins_nothing(fleet: InProcessFleet) -> None:
    gathering = fleet.server.coordinator.implicit._gathering
    leaving = asyncio.ensure_future(group(fleet, "a", 1))
    await eventually(lambda: bool(gathering._pending))
    leaving.cancel()
    await eventually(lambda: not gathering._pending)
    await form(fleet)


async def test_requests_that_were_frozen_by_name_are_computed_anew(fleet: InProcessFleet) -> None:
    """vLLM's pauses keep requests, and its trainers' writes flush: neither may leave the weights a mixture."""
    await form(fleet)
    frozen = engines(fleet)[0]
    frozen._running["frozen"] = asyncio.Event()
    await pause(fleet, "IN_PLACE")
    assert (await write(fleet, "w1", options=v.UpdateOptions())).state == OPERATION_STATE_OK
    ended = await end(fleet)
    assert ended.state == OPERATION_STATE_OK, ended.error
    assert states(fleet) == [PAUSED, PAUSED], "it is still paused by name"
    assert frozen._paused == common.PAUSE_MODE_RETRACT
    frozen._running.clear()
    assert (await go_on(fleet)).state == OPERATION_STATE_OK


async def test_a_flush_is_a_step_of_the_update_that_is_open(fleet: InProcessFleet) -> None:
    """verl flushes after its last write, before anything of its own ends the update."""
    await form(fleet)
    await pause(fleet)
    await write(fleet, "w1")
    keyed = v.FlushCacheRequest(header=RequestHeader(request_id=new_uuid7()))
    for request in (keyed, v.FlushCacheRequest(header=RequestHeader(target=Target(slots=["a"])))):
        flushed = await fleet.stub.FlushCache(request)
        assert flushed.state == OPERATION_STATE_OK, flushed.error
    coordinator = fleet.server.coordinator
    restarted = [Slot(slot.record) for slot in coordinator.roster.slots.values()]
    assert coordinator.implicit.flushed_in(restarted), "also of a stage that was restarted"
    assert (await end(fleet)).state == OPERATION_STATE_OK
    assert (await fleet.stub.FlushCache(keyed)).replayed


async def test_an_adapter_that_every_engine_is_told_of_is_loaded_once(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    def load(slot: str) -> v.LoadAdapterRequest:
        return v.LoadAdapterRequest(header=header(slot), name="math", path=checkpoint("math"))

    first, second = await asyncio.gather(*(fleet.stub.LoadAdapter(load(slot)) for slot in "ab"))
    assert (first.state, first.operation_id) == (OPERATION_STATE_OK, second.operation_id), first.error
    assert [len(fleet.stage(slot).report.adapters) for slot in "ab"] == [1, 1]
    for slot in "ab":
        request = v.UnloadAdapterRequest(header=header(slot), name="math")
        assert (await fleet.stub.UnloadAdapter(request)).state == OPERATION_STATE_OK
    assert len(await operations(fleet, "UnloadAdapter")) == 1


async def test_half_of_an_update_is_never_served(fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implicit, "LEASE_S", 0.5)
    await form(fleet)
    await pause(fleet)
    await write(fleet, "w1")
    [running] = fleet.server.coordinator.operations.newest_first("WeightUpdate", 0)
    await running.ended.wait()
    await eventually(lambda: states(fleet) == [DIRTY, DIRTY])
    [update] = await operations(fleet, "WeightUpdate")
    assert update.error.reason == "LEASE_EXPIRED"
    refused = await go_on(fleet)
    assert {r.error.reason for r in refused.stage_results} == {"WEIGHTS_DIRTY"}
    assert version_of(fleet) == ("initial", 1)


async def test_a_write_that_failed_ends_its_update_and_the_next_one_starts_anew(fleet: InProcessFleet) -> None:
    await form(fleet)
    await pause(fleet)
    fault(fleet, 1, 2, "update_weights_from_distributed", Reason.GROUP_FAILED.error("gone"))
    failed = await write(fleet, "w1")
    assert failed.state != OPERATION_STATE_OK
    assert (await go_on(fleet)).state != OPERATION_STATE_OK
    assert version_of(fleet) == ("initial", 1)
    fault(fleet, 1, 2, "none", Reason.GROUP_FAILED.error())
    await form(fleet, "again")
    assert (await write(fleet, "w2", group_name="again")).state == OPERATION_STATE_OK
    assert (await go_on(fleet)).state == OPERATION_STATE_OK
    assert weights(fleet) == ["w2"] * 3
    assert states(fleet) == [READY, READY]


async def test_what_two_trainers_send_is_not_put_together(fleet: InProcessFleet) -> None:
    for name in ("one", "two"):
        await form(fleet, name)
    await pause(fleet)
    await write(fleet, "w1", group_name="one", weight_version="first")
    refused = await refusal(write(fleet, "w2", "w1", group_name="two", weight_version="second"))
    assert (refused.reason, refused.field) == (Reason.UPDATE_IN_PROGRESS, "buckets[0].names[1]")
    assert "w1" in refused.message
    assert "'one'" in refused.message
    assert (await write(fleet, "w1", "w2", group_name="one")).state == OPERATION_STATE_OK, "its own may come again"
    assert (await go_on(fleet)).state == OPERATION_STATE_OK
    assert version_of(fleet) == ("first", 2)
    assert taken(fleet) == [["w1", "w1,w2"]] * 3
    assert (await write(fleet, "w1", group_name="two", weight_version="second")).state == OPERATION_STATE_OK


async def test_a_write_over_a_group_that_nobody_is_in_ends_nobodys_update(fleet: InProcessFleet) -> None:
    await form(fleet)
    await pause(fleet)
    await write(fleet, "w1")
    failed = await write(fleet, "w2", group_name="late")
    assert {result.error.reason for result in failed.stage_results} == {"GROUP_NOT_FOUND"}
    await form(fleet, "late")
    for name, group_name in (("w2", "late"), ("w3", "slime-pp_0")):
        assert (await write(fleet, name, group_name=group_name)).state == OPERATION_STATE_OK
    assert (await go_on(fleet)).state == OPERATION_STATE_OK
    assert taken(fleet) == [["w2", "w3"]] * 3, "since the group was formed"
    [update] = await operations(fleet, "WeightUpdate")
    assert update.state == OPERATION_STATE_OK


async def test_an_update_that_cannot_be_published_keeps_generation_from_going_on(fleet: InProcessFleet) -> None:
    await form(fleet)
    await pause(fleet)
    await write(fleet, "w1")
    fleet.stages["a"]._engine.weights = "other"
    refused = await refusal(go_on(fleet, "b"))
    assert refused.reason in (Reason.QUORUM_NOT_MET, Reason.DIGEST_MISMATCH)
    assert "was not published" in refused.message
    assert states(fleet) == [DIRTY, DIRTY]
    assert version_of(fleet) == ("initial", 1)


async def test_a_begin_without_a_write_is_dropped_by_the_continue(fleet: InProcessFleet) -> None:
    await pause(fleet)
    await fleet.stub.BeginWeightUpdate(u.BeginWeightUpdateRequest(implicit=True))
    assert (await go_on(fleet)).state == OPERATION_STATE_OK
    assert (states(fleet), version_of(fleet)) == ([READY, READY], ("initial", 1))


async def test_an_update_by_name_is_not_joined_without_it(fleet: InProcessFleet) -> None:
    await form(fleet)
    await begin(fleet)
    assert (await refusal(write(fleet, "w1"))).reason is Reason.UPDATE_IN_PROGRESS
    assert (await refusal(end(fleet, version="x"))).reason is Reason.UPDATE_IN_PROGRESS


async def test_an_operation_that_was_joined_is_known_after_a_restart(fleet: InProcessFleet) -> None:
    await form(fleet)
    keys = {slot: new_uuid7() for slot in "ab"}
    first = await write(fleet, "w1", slot="a", key=keys["a"])
    await write(fleet, "w1", slot="b", key=keys["b"])
    await fleet.channel.close()
    await fleet.server.stop()
    await fleet.start_coordinator(fleet.server.address)
    again = await write(fleet, "w1", slot="b", key=keys["b"])
    assert (again.operation_id, again.replayed) == (first.operation_id, True)
    assert weights(fleet) == ["w1"] * 3
    assert digest("w1") == again.model_digest
    assert {r.outcome for r in again.stage_results} == {OUTCOME_APPLIED}


def hold(fleet: InProcessFleet, method: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Let stage a come to a method of its engine and wait there: set when it has come, to be set for it to go on."""
    engine, entered, held = fleet.stages["a"]._engine, asyncio.Event(), asyncio.Event()
    go_on = getattr(engine, method)

    async def slowly(*args: object) -> object:
        entered.set()
        await held.wait()
        return await go_on(*args)

    setattr(engine, method, slowly)
    return entered, held


async def test_a_write_that_is_a_whole_update_takes_no_other_one_in(fleet: InProcessFleet) -> None:
    await form(fleet)
    entered, held = hold(fleet, "update_weights_from_distributed")
    whole = asyncio.ensure_future(write(fleet, "w1"))
    await entered.wait()
    other = await refusal(write(fleet, "w2"))
    held.set()
    assert other.reason is Reason.UPDATE_IN_PROGRESS
    assert (await whole).state == OPERATION_STATE_OK
    assert weights(fleet) == ["w1"] * 3


async def test_a_repeat_while_a_group_forms_does_not_keep_its_name(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, held = hold(fleet, "init_weights_update_group")
    joining, joined = fleet.server.coordinator.implicit.joining, list[object]()
    join = joining.run

    async def counted(*args: Any) -> Joined:
        joined.append(result := await join(*args))
        return result

    monkeypatch.setattr(joining, "run", counted)
    calls = [asyncio.ensure_future(group(fleet, slot, offset)) for slot, offset in (("a", 1), ("b", 2))]
    await entered.wait()
    calls.append(asyncio.ensure_future(group(fleet, "a", 1)))
    await eventually(lambda: len(joined) == 3)
    held.set()
    assert len({(await call).operation_id for call in calls}) == 1
    again = await asyncio.gather(group(fleet, "a", 1, master_port=2), group(fleet, "b", 2, master_port=2))
    assert {operation.state for operation in again} == {OPERATION_STATE_OK}


async def test_a_begin_that_is_repeated_while_it_is_recorded_is_the_same(fleet: InProcessFleet) -> None:
    request = u.BeginWeightUpdateRequest(header=header("a", new_uuid7()), implicit=True)
    repeat: list[asyncio.Task[u.BeginWeightUpdateResponse]] = []

    async def once_more() -> None:
        repeat.append(asyncio.create_task(fleet.server.coordinator.begin_weight_update(request)))
        await asyncio.wait(repeat, timeout=MEANWHILE_S)

    async with at_write(fleet, lambda put: put.kind == "operation", before=once_more):
        first = await fleet.stub.BeginWeightUpdate(request)
    assert (await repeat[0]).update_id == first.update_id


async def test_a_group_that_is_cancelled_while_its_store_is_waited_for_is_not_formed(fleet: InProcessFleet) -> None:
    engine, probed = fleet.stages["a"]._engine, asyncio.Event()

    async def no_store(*_: object) -> object:
        probed.set()
        raise Reason.UNREACHABLE.error("nobody listens", field="master_address", outcome=common.OUTCOME_REJECTED)

    engine.init_weights_update_group = no_store
    calls = [asyncio.ensure_future(group(fleet, slot, offset)) for slot, offset in (("a", 1), ("b", 2))]
    await probed.wait()
    [running] = await operations(fleet, "InitWeightsUpdateGroup")
    async with asyncio.timeout(collective_fanout.LEAVE_S):
        await fleet.stub.CancelOperation(rpc.CancelOperationRequest(operation_id=running.operation_id))
    for call in calls:
        ended = await call
        assert (ended.state, ended.error.reason) == (OPERATION_STATE_CANCELLED, "CANCELLED")


async def test_a_stage_that_missed_the_new_label_of_its_version_is_told(fleet: InProcessFleet) -> None:
    """Its weights are the published ones: where no other stage has them either, nobody could bring it to them."""
    await form(fleet)
    assert (await write(fleet, "w1")).state == OPERATION_STATE_OK
    slots = fleet.server.coordinator.roster.slots.values()

    def renames(put: Put) -> bool:
        return put.kind == "model" and ModelRecord.FromString(put.body).latest.label == "step-1"

    async def cut() -> None:
        for slot in slots:
            assert slot.commander is not None
            await slot.commander.close()
        await eventually(lambda: set(states(fleet)) == {common.STAGE_STATE_UNREACHABLE})

    async with at_write(fleet, renames, after=cut):
        await end(fleet, version="step-1")
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    assert {fleet.stage(slot).report.weight_version.label for slot in "ab"} == {"step-1"}
    assert version_of(fleet) == ("step-1", 2)
    assert weights(fleet) == ["w1"] * 3


async def test_an_engine_that_does_not_answer_keeps_no_update_of_another_model_from_beginning(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    fleet.specs.append(StageSpec("critic", checkpoint("early"), model="critic"))
    await fleet.start_stage(fleet.specs[-1])
    await fleet.until(lambda stages: stages[2].routable)
    asked, answered = asyncio.Event(), asyncio.Event()

    async def silent(engine: FakeEngine, name: str, _: object) -> None:
        if name == "get_model_info":
            asked.set()
            await answered.wait()

    fake_engine.FAULTS[fleet.specs[-1].model_path, 0] = silent
    waiting = asyncio.ensure_future(write(fleet, "w1", slot="critic"))
    await asked.wait()
    async with asyncio.timeout(implicit.ASK_S / 2):
        await fleet.stub.BeginWeightUpdate(u.BeginWeightUpdateRequest(header=header("a"), implicit=True))
    answered.set()
    assert (await waiting).state == OPERATION_STATE_FAILED, "it has no group"


async def test_a_write_that_was_refused_counts_for_nothing(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, receive = list[int](), FakeEngine.update_weights_from_distributed

    async def note(engine: FakeEngine, request: v.UpdateWeightsFromDistributedRequest, call: Call) -> object:
        if engine.config.tp_size == 1:
            numbers.extend(bucket.sequence for bucket in request.buckets)
        return await receive(engine, request, call)

    monkeypatch.setattr(FakeEngine, "update_weights_from_distributed", note)
    await form(fleet)
    await pause(fleet)
    await write(fleet, "w1", weight_version="step-1")
    async with full_disk(fleet, "operation"):
        refused = write(fleet, "w2", weight_version="step-2", options=v.UpdateOptions(flush_cache=True))
        assert (await refusal(refused)).reason is Reason.JOURNAL_FAILED
    update = fleet.server.coordinator.updates.implicit_of("actor")
    assert update is not None
    assert not update.record.request.options.flush_cache
    assert (await write(fleet, "w2")).state == OPERATION_STATE_OK
    assert numbers == [0, 1]
    await go_on(fleet)
    assert version_of(fleet)[0] == "step-1"
