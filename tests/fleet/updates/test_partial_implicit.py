"""Updates that a client begins and ends without a name, with some of the tensors only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fleet_steps import dirty, end, group, header
from updating import fault, refusal, version_of
from waiting import eventually

from rlctl.contract.errors import Reason
from rlctl.coordinator.updates import implicit
from rlctl.engine import Call
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, Operation

DIRTY, PAUSED, READY = common.STAGE_STATE_DIRTY, common.STAGE_STATE_PAUSED, common.STAGE_STATE_READY

REFERENCE = ("w1", "w2", "w3")


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors that every fake engine lists, and the kinds of the updates that were prepared at stage a."""
    prepared: list[str] = []
    info, prepare = FakeEngine.get_model_info, FakeEngine.prepare_update

    async def listing(engine: FakeEngine, request: v.GetModelInfoRequest, call: Call) -> v.ModelInfo:
        told = await info(engine, request, call)
        told.reference.extend(v.TensorInfo(name=name, dtype="torch.float32") for name in REFERENCE)
        return told

    async def note(engine: FakeEngine, request: v.PrepareUpdateRequest, call: Call) -> v.WeightsReport:
        if engine.config.tp_size == 1:
            prepared.append(v.UpdateKind.Name(request.kind).removeprefix("UPDATE_KIND_"))
        return await prepare(engine, request, call)

    monkeypatch.setattr(FakeEngine, "get_model_info", listing)
    monkeypatch.setattr(FakeEngine, "prepare_update", note)
    return prepared


async def begun(fleet: InProcessFleet, name: str = "trainer", **fields: object) -> None:
    """A trainer's group, its pause, and its begin at every engine."""
    for operation in await asyncio.gather(group(fleet, "b", 1, group_name=name), group(fleet, "a", 3, group_name=name)):
        assert operation.state == OPERATION_STATE_OK, operation.error
    pause = v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT)
    assert (await fleet.stub.PauseGeneration(pause)).state == OPERATION_STATE_OK
    for slot in "ab":
        await begin(fleet, slot, **fields)


async def begin(fleet: InProcessFleet, slot: str, **fields: object) -> None:
    request = u.BeginWeightUpdateRequest(header=header(slot), implicit=True, may_be_partial=True, **fields)
    await fleet.stub.BeginWeightUpdate(request)


async def write(fleet: InProcessFleet, *names: str, group_name: str = "trainer", **fields: object) -> Operation:
    bucket = v.TensorBucket(names=names, dtypes=["torch.float32"] * len(names), shapes=[v.Shape()] * len(names))
    request = v.UpdateWeightsFromDistributedRequest(
        group_name=group_name, buckets=[bucket], options=v.UpdateOptions(flush_cache=False), **fields
    )
    return await fleet.stub.UpdateWeightsFromDistributed(request)


async def end_partial(fleet: InProcessFleet, slot: str = "") -> Operation:
    return await end(fleet, slot, partial=True)


async def go_on(fleet: InProcessFleet) -> Operation:
    return await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest())


def states(fleet: InProcessFleet) -> list[int]:
    return [fleet.stage(slot).state for slot in "ab"]


async def test_an_end_publishes_the_tensors_that_were_written(fleet: InProcessFleet, reference: list[str]) -> None:
    await begun(fleet)
    assert (await write(fleet, "w2", weight_version="step-1")).state == OPERATION_STATE_OK
    both = await asyncio.gather(end_partial(fleet, "a"), end_partial(fleet, "b"))
    assert [each.state for each in both] == [OPERATION_STATE_OK] * 2
    assert both[0].operation_id == both[1].operation_id
    assert reference == ["PARTIAL"]
    assert version_of(fleet) == ("step-1", 2)
    assert states(fleet) == [PAUSED, PAUSED]
    assert (await go_on(fleet)).state == OPERATION_STATE_OK
    assert (states(fleet), version_of(fleet)) == ([READY, READY], ("step-1", 2))


@pytest.mark.parametrize("ended_by", ["continue", "version", "end of another client"])
async def test_nothing_else_publishes_a_part(fleet: InProcessFleet, ended_by: str) -> None:
    """Half of an update of a trainer that died: whoever continues, or names the weights, must not publish it."""
    await begun(fleet)
    await write(fleet, "w1", "w3", weight_version="half")
    match ended_by:
        case "continue":
            error = await refusal(go_on(fleet))
        case "version":
            ended = await end(fleet, version="half")
            assert ended.state == OPERATION_STATE_FAILED
            error = Reason[ended.error.reason].error(ended.error.message)
        case "end of another client":
            ended = await end(fleet)
            assert ended.state == OPERATION_STATE_FAILED
            error = Reason[ended.error.reason].error(ended.error.message)
    assert error.reason is Reason.WEIGHTS_INCOMPLETE
    assert "1 tensors were not written: w2" in error.message
    await eventually(lambda: states(fleet) == [DIRTY, DIRTY])
    assert version_of(fleet) == ("initial", 1)
    refused = await go_on(fleet)
    assert {result.error.reason for result in refused.stage_results} == {"WEIGHTS_DIRTY"}


@pytest.mark.parametrize("ended_by", ["continue", "end", "version"])
async def test_all_tensors_are_a_full_update_whatever_ends_it(fleet: InProcessFleet, ended_by: str) -> None:
    await begun(fleet)
    for names in (("w1",), ("w2", "w3")):
        assert (await write(fleet, *names, weight_version="step-1")).state == OPERATION_STATE_OK
    calls: dict[str, Callable[[], object]] = {
        "continue": lambda: go_on(fleet),
        "end": lambda: end_partial(fleet),
        "version": lambda: end(fleet, version="step-1"),
    }
    assert (await calls[ended_by]()).state == OPERATION_STATE_OK  # type: ignore[misc]
    assert version_of(fleet) == ("step-1", 2)


async def test_a_part_whose_write_failed_is_not_left_out(fleet: InProcessFleet) -> None:
    """A client that does not look at the answers to its writes ends an update that misses what it has sent."""
    await begun(fleet)
    await write(fleet, "w1")
    assert (await write(fleet, "w2", group_name="nobody's")).state != OPERATION_STATE_OK
    ended = await end_partial(fleet)
    assert (ended.state, ended.error.reason) == (OPERATION_STATE_FAILED, "WEIGHTS_INCOMPLETE")
    assert "w2" in ended.error.message
    assert version_of(fleet) == ("initial", 1)


async def test_a_part_whose_write_failed_may_come_again(fleet: InProcessFleet) -> None:
    await begun(fleet)
    await write(fleet, "w1")
    assert (await write(fleet, "w2", group_name="nobody's")).state != OPERATION_STATE_OK
    assert (await write(fleet, "w2")).state == OPERATION_STATE_OK
    assert (await end_partial(fleet)).state == OPERATION_STATE_OK
    assert version_of(fleet)[1] == 2


async def test_a_write_that_is_under_way_at_the_end_is_part_of_the_update(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, may_end, take = asyncio.Event(), asyncio.Event(), FakeEngine.update_weights_from_distributed

    async def slowly(engine: FakeEngine, request: v.UpdateWeightsFromDistributedRequest, call: Call) -> object:
        entered.set()
        await may_end.wait()
        return await take(engine, request, call)

    monkeypatch.setattr(FakeEngine, "update_weights_from_distributed", slowly)
    await begun(fleet)
    writing = asyncio.ensure_future(write(fleet, "w1"))
    await entered.wait()
    ending = asyncio.ensure_future(end_partial(fleet))
    await asyncio.sleep(0.05)
    assert not ending.done()
    may_end.set()
    assert (await writing).state == (await ending).state == OPERATION_STATE_OK


async def test_a_trainer_that_was_started_anew_does_not_end_the_half_of_the_one_before(fleet: InProcessFleet) -> None:
    """Its begin is refused, as are its tensors; a client that ignores both ends what it has not begun."""
    await begun(fleet)
    await write(fleet, "w1", "w2")
    for operation in await asyncio.gather(
        *(group(fleet, slot, offset, group_name="anew") for slot, offset in (("b", 1), ("a", 3)))
    ):
        assert operation.state == OPERATION_STATE_OK, operation.error
    assert (await refusal(begin(fleet, "a"))).reason is Reason.UPDATE_IN_PROGRESS
    assert (await refusal(write(fleet, "w1", "w2", group_name="anew"))).reason is Reason.UPDATE_IN_PROGRESS
    ended = await end_partial(fleet)
    assert (ended.state, ended.error.reason) == (OPERATION_STATE_FAILED, "WEIGHTS_INCOMPLETE")
    assert version_of(fleet) == ("initial", 1)
    await begin(fleet, "a")
    written = await write(fleet, "w1", "w2", "w3", group_name="anew", weight_version="anew")
    assert written.state == OPERATION_STATE_OK
    assert (await end_partial(fleet)).state == OPERATION_STATE_OK
    assert version_of(fleet)[0] == "anew"


async def test_stages_that_are_not_at_the_version_need_all_tensors(fleet: InProcessFleet, reference: list[str]) -> None:
    await dirty(fleet)
    await begun(fleet)
    await write(fleet, "w1")
    assert reference[-1] == "FULL", "the engines look for tensors that are missing"


@pytest.mark.parametrize(("kind", "state"), [("FULL", OPERATION_STATE_FAILED), ("PARTIAL", OPERATION_STATE_OK)])
async def test_a_kind_that_a_write_names_is_kept(fleet: InProcessFleet, kind: str, state: int) -> None:
    await begun(fleet)
    value = v.UpdateKind.Value(f"UPDATE_KIND_{kind}")
    await write(fleet, "w1", kind=value)
    other = v.UPDATE_KIND_PARTIAL if value == v.UPDATE_KIND_FULL else v.UPDATE_KIND_FULL
    assert (await refusal(write(fleet, "w1", kind=other))).reason is Reason.FIELD_CONFLICT
    assert (await write(fleet, "w1")).state == OPERATION_STATE_OK
    assert (await end_partial(fleet)).state == state


async def test_a_trainer_that_is_silent_has_published_no_part(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implicit, "LEASE_S", 0.5)
    await begun(fleet)
    await write(fleet, "w1")
    [running] = fleet.server.coordinator.operations.newest_first("WeightUpdate", 0)
    await running.ended.wait()
    await eventually(lambda: states(fleet) == [DIRTY, DIRTY])
    await refusal(end_partial(fleet))
    assert version_of(fleet) == ("initial", 1)


async def test_a_broadcast_that_breaks_ends_a_partial_update(fleet: InProcessFleet) -> None:
    await begun(fleet)
    await write(fleet, "w1")
    fault(fleet, 1, 2, "update_weights_from_distributed", Reason.GROUP_FAILED.error("gone"))
    assert (await write(fleet, "w2")).state != OPERATION_STATE_OK
    await refusal(end_partial(fleet))
    assert version_of(fleet) == ("initial", 1)


@pytest.mark.parametrize("ended_by", ["version", "continue"])
async def test_the_end_of_an_update_that_is_committed_already_is_confirmed(
    fleet: InProcessFleet, ended_by: str
) -> None:
    """Miles names the version before it ends the update."""
    await begun(fleet)
    await write(fleet, *REFERENCE, weight_version="step-1")
    committed = await (end(fleet, version="step-1") if ended_by == "version" else go_on(fleet))
    assert committed.state == OPERATION_STATE_OK
    before = version_of(fleet)
    both = await asyncio.gather(end_partial(fleet, "a"), end_partial(fleet, "b"))
    assert [each.state for each in both] == [OPERATION_STATE_OK] * 2
    assert {each.weight_version.label for each in both} == {"step-1"}
    assert version_of(fleet) == before == ("step-1", 2)
    await begin(fleet, "a")
    ended = await end_partial(fleet)
    assert (ended.state, ended.error.reason) == (OPERATION_STATE_FAILED, "WEIGHTS_INCOMPLETE"), "nothing was written"
    assert version_of(fleet) == before


async def test_an_end_confirms_no_update_that_another_version_has_followed(fleet: InProcessFleet) -> None:
    await begun(fleet)
    await write(fleet, *REFERENCE)
    assert (await end(fleet, version="step-1")).state == OPERATION_STATE_OK
    followed = v.UpdateWeightsFromDiskRequest(model_path=fleet.specs[0].model_path, weight_version="other")
    assert (await fleet.stub.UpdateWeightsFromDisk(followed)).state == OPERATION_STATE_OK
    assert (await refusal(end_partial(fleet))).reason is Reason.UPDATE_NOT_FOUND
