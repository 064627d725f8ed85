"""Adapters as objects of a model: at every stage or at none, one version at a time, there again after a restart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from fleet_steps import engines, held, load
from journal_faults import full_disk
from updating import Held, commit, digest, join, refusal, unreachable, version_of, write
from waiting import eventually

from rlctl.command_stream import commander
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.verbs import Verb
from rlctl.coordinator.fleet import stage_links
from rlctl.engine import Call
from rlctl.sdk import aio
from rlctl.stage.relay import Relay
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import open_channel
from rlctl.transport.status import from_grpc
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.common_pb2 import OUTCOME_APPLIED, OUTCOME_REJECTED, OUTCOME_UNKNOWN, RequestHeader, Target
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_FAILED,
    OPERATION_STATE_OK,
    OPERATION_STATE_PARTIAL,
    OPERATION_STATE_UNKNOWN,
    Operation,
)
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

Checkpoint = Callable[[str], str]


def recorded(fleet: InProcessFleet) -> list[tuple[str, str]]:
    """What the model has, by the coordinator's word."""
    adapters = fleet.server.coordinator.roster.models["actor"].record.adapters
    return [(adapter.name, adapter.version) for adapter in adapters]


async def generate(fleet: InProcessFleet, slot: str, adapter: str = "math", tokens: int = 2) -> rollout.Sample:
    """One sample from one stage."""
    address = fleet.stage(slot).registration.rollout_address
    async with open_channel(address) as channel:
        answer = await RolloutServiceStub(channel).Generate(_request(adapter, tokens))
    return answer.samples[0]


async def generated_soon(fleet: InProcessFleet, slot: str) -> rollout.Sample:
    """One sample from a stage that may still have to hear that it may serve: the coordinator's view runs behind."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await generate(fleet, slot)
            except grpc.aio.AioRpcError as error:
                if from_grpc(error).reason is not Reason.STAGE_NOT_SERVING:
                    raise
            await asyncio.sleep(0.01)


def _request(adapter: str, tokens: int) -> rollout.GenerateRequest:
    params = rollout.SamplingParams(max_new_tokens=tokens)
    return rollout.GenerateRequest(text="x", adapter=adapter, sampling_params=params)


async def not_generated(fleet: InProcessFleet, slot: str, adapter: str = "math") -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(fleet, slot, adapter)
    return from_grpc(caught.value).reason


def failing(fleet: InProcessFleet, method: str, outcome: int, *, tp_size: int = 2) -> None:
    """Let a method fail at the stage of this size, at all of its ranks."""

    async def fault(engine: FakeEngine, called: str, call: Call) -> None:
        if called == method and engine.config.tp_size == tp_size:
            raise Reason.ENGINE_FAILED.error("as the test wants it", outcome=outcome)  # type: ignore[arg-type]

    for rank in range(tp_size):
        fake_engine.FAULTS[fleet.specs[0].model_path, rank] = fault


async def restart(fleet: InProcessFleet, slot: str) -> None:
    """A new process in a slot, routable."""
    incarnation = fleet.stage(slot).incarnation
    await fleet.stages[slot].stop()
    await fleet.start_stage(next(spec for spec in fleet.specs if spec.slot == slot))
    await fleet.until(
        lambda stages: any(s.registration.slot == slot and s.incarnation > incarnation and s.routable for s in stages)
    )


async def begin(fleet: InProcessFleet, version: str = "a-7", **fields: object) -> u.BeginWeightUpdateResponse:
    config = v.AdapterConfig(lora_rank=4, lora_alpha=8, target_modules=["q_proj"], dtype="torch.float32")
    request = u.BeginWeightUpdateRequest(
        **{
            "model": "actor",
            "version": version,
            "kind": v.UPDATE_KIND_ADAPTER,
            "adapter": "math",
            "adapter_config": config,
            "trainer": u.Trainer(name="trainer", boot_id="boot"),
            **fields,
        }
    )
    return await fleet.stub.BeginWeightUpdate(request)


async def test_loaded_at_every_rank_and_served_with_its_version(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    before = version_of(fleet)
    operation = await load(fleet, checkpoint("lora"))
    assert operation.state == OPERATION_STATE_OK
    assert [len(stage.rank_results) for stage in operation.stage_results] == [1, 2]
    assert [(a.name, a.version, a.digest) for a in operation.adapters] == [("math", "a-1", digest("lora"))]
    assert held(fleet) == [{"math": ("a-1", "lora")}] * 3
    assert (recorded(fleet), version_of(fleet)) == ([("math", "a-1")], before)
    listed = await fleet.stub.ListAdapters(v.ListAdaptersRequest())
    assert [[a.name for a in r.adapters.adapters] for s in listed.stage_results for r in s.rank_results] == [
        ["math"]
    ] * 3
    for slot in "ab":
        assert fleet.stage(slot).routable
        assert {span.adapter_version for span in (await generate(fleet, slot)).versions} == {"a-1"}
        assert {span.adapter_version for span in (await generate(fleet, slot, "")).versions} == {""}
        assert await not_generated(fleet, slot, "physics") is Reason.ADAPTER_NOT_FOUND


async def test_a_full_disk_is_found_before_requests_with_the_adapter_stop(fleet: InProcessFleet) -> None:
    called: list[str] = []

    async def record(_: FakeEngine, name: str, __: Call) -> None:
        called.append(name)

    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "lora")
    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = record
    async with full_disk(fleet):
        ended = await commit(fleet, plan, digest("lora"))
    assert ended.error.reason == "JOURNAL_FAILED"
    assert {result.outcome for result in ended.stage_results} == {OUTCOME_REJECTED}
    assert "seal_update" not in called
    assert "abort_update" in called


async def test_nothing_is_replaced_unless_every_target_has_read_the_same(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await load(fleet, checkpoint("lora"))
    failing(fleet, "load_adapter", OUTCOME_REJECTED)
    operation = await load(fleet, checkpoint("new"), "a-2")
    assert operation.state == OPERATION_STATE_FAILED
    assert {result.outcome for result in operation.stage_results} == {OUTCOME_REJECTED}
    fake_engine.FAULTS.clear()

    async def differing(engine: FakeEngine, called: str, call: Call) -> None:
        if called == "check_weights" and engine.config.tp_size == 2:
            assert engine._staged is not None
            engine._staged = (engine._staged[0], "something else")

    for rank in range(2):
        fake_engine.FAULTS[fleet.specs[0].model_path, rank] = differing
    operation = await load(fleet, checkpoint("new"), "a-2")
    assert {result.error.reason for result in operation.stage_results} == {"DIGEST_MISMATCH"}
    missing = await load(fleet, checkpoint("new") + "-nowhere", "a-2")
    assert missing.error.reason == "CHECKPOINT_NOT_FOUND"
    assert held(fleet) == [{"math": ("a-1", "lora")}] * 3
    assert recorded(fleet) == [("math", "a-1")]
    for slot in "ab":
        assert fleet.stage(slot).routable, "nothing that is served was touched"
        assert {span.adapter_version for span in (await generate(fleet, slot)).versions} == {"a-1"}


async def test_a_target_that_cannot_say_whether_it_replaced_serves_neither(
    make_fleet: Callable, checkpoint: Checkpoint
) -> None:
    async with make_fleet(a=1, b=2) as fleet:
        await load(fleet, checkpoint("lora"))
        failing(fleet, "commit_update", OUTCOME_UNKNOWN)
        operation = await load(fleet, checkpoint("new"), "a-2")
        assert operation.state in (OPERATION_STATE_UNKNOWN, OPERATION_STATE_PARTIAL)
        outcomes = {result.slot: result.outcome for result in operation.stage_results}
        assert outcomes == {"a": OUTCOME_APPLIED, "b": OUTCOME_UNKNOWN}
        assert recorded(fleet) == [("math", "a-2")]
        assert {span.adapter_version for span in (await generate(fleet, "a")).versions} == {"a-2"}
        assert not fleet.stage("b").routable
        assert await not_generated(fleet, "b") in (Reason.STAGE_NOT_SERVING, Reason.ADAPTER_NOT_FOUND)
        fake_engine.FAULTS.clear()
        healed = await fleet.stub.HealStage(_heal("b"))
        assert healed.state == OPERATION_STATE_OK, healed
        await eventually(lambda: fleet.stage("b").routable)
        assert {span.adapter_version for span in (await generate(fleet, "b")).versions} == {"a-2"}
        assert held(fleet) == [{"math": ("a-2", "new")}] * 3


def _heal(*slots: str) -> object:
    from rlctl.v1.coordinator_pb2 import HealStageRequest

    return HealStageRequest(slots=slots)


async def test_what_has_staged_it_has_not_confirmed_it(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    """What became of the commit is lost with the disk, and that a stage has read the adapter is no answer to that."""
    async with contextlib.AsyncExitStack() as filled:

        async def fill(engine: FakeEngine, name: str, call: Call) -> None:
            if name == "commit_update":
                fake_engine.FAULTS.clear()
                await filled.enter_async_context(full_disk(fleet))
                raise Reason.ENGINE_FAILED.error("it cannot", outcome=common.OUTCOME_DIRTY)

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fill
        operation = await load(fleet, checkpoint("math"))
    assert operation.state == OPERATION_STATE_UNKNOWN
    assert {result.outcome for result in operation.stage_results} == {OUTCOME_UNKNOWN}


async def test_a_restarted_stage_has_them_again_from_disk(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    await load(fleet, checkpoint("lora"))
    await restart(fleet, "a")
    await eventually(lambda: bool(fleet.stage("a").report.adapters) and fleet.stage("a").routable)
    assert held(fleet) == [{"math": ("a-1", "lora")}] * 3
    assert {span.adapter_version for span in (await generate(fleet, "a")).versions} == {"a-1"}


@pytest.mark.parametrize("label", ["", "a-1"])
async def test_a_stage_that_was_away_serves_no_other_adapter_of_the_same_label(
    make_fleet: Callable, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    monkeypatch.setattr(stage_links, "DRIFT_S", 0.1)
    monkeypatch.setattr(commander, "PING_EVERY_S", 0.02)
    async with make_fleet(a=1, b=1, lease_s=0.3) as fleet:
        assert (await load(fleet, checkpoint("old"), label)).state == OPERATION_STATE_OK
        async with unreachable(fleet, "b"):
            loaded = await load(fleet, checkpoint("new"), label)
            assert [result.slot for result in loaded.stage_results] == ["a"]
        await eventually(lambda: held(fleet)[1]["math"][1] == "new")  # it is healed
        assert (await generated_soon(fleet, "b")).versions
        labels = {held_by["math"][0] for held_by in held(fleet)}
        assert {version for _, version in recorded(fleet)} == labels


async def test_labels_that_are_made_up_tell_apart_what_was_loaded_at_once(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    labels = []
    for text in ("one", "two"):
        await load(fleet, checkpoint(text), "")
        labels += [version for _, version in recorded(fleet)]
    assert len(set(labels)) == 2


async def test_what_is_read_again_must_be_what_was_loaded(make_fleet: Callable, checkpoint: Checkpoint) -> None:
    async with make_fleet(a=1, b=2) as fleet:
        path = checkpoint("lora")
        await load(fleet, path)
        (Path(path) / "weights.txt").write_text("written over")
        await restart(fleet, "a")
        await eventually(lambda: any(o.verb == "HealStage" and o.error.reason for o in _operations(fleet)), 10)
        assert held(fleet)[:1] == [{}]
        assert await not_generated(fleet, "a") is Reason.ADAPTER_NOT_FOUND
        await eventually(lambda: fleet.stage("a").routable)
        assert (await generate(fleet, "a", "")).output_ids


async def test_what_is_read_again_must_have_the_scale_that_was_loaded(
    make_fleet: Callable, checkpoint: Checkpoint
) -> None:
    """The tensors are equal, so the digests are, but the outputs differ."""
    async with make_fleet(a=1, b=2) as fleet:
        path = checkpoint("lora")
        loaded = await load(fleet, path)
        assert [adapter.scale for adapter in loaded.adapters] == [1.0]
        (Path(path) / "scale.txt").write_text("4")
        await restart(fleet, "a")
        await eventually(lambda: any(o.verb == "HealStage" and o.error.reason for o in _operations(fleet)), 10)
        heal = next(o for o in _operations(fleet) if o.verb == "HealStage" and o.error.reason)
        assert heal.error.reason == "CHECKPOINT_MISMATCH"
        assert "its adapter has scale 4, not 1" in heal.error.message
        assert held(fleet)[:1] == [{}]
        assert await not_generated(fleet, "a") is Reason.ADAPTER_NOT_FOUND


async def test_targets_with_different_scales_replace_nothing(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    """Hosts may have different copies of an adapter's configuration."""
    await load(fleet, checkpoint("lora"))

    async def differing(engine: FakeEngine, called: str, call: Call) -> None:
        if called == "check_weights" and engine.config.tp_size == 2:
            assert engine._staged is not None
            engine._staged[0].scale = 2

    for rank in range(2):
        fake_engine.FAULTS[fleet.specs[0].model_path, rank] = differing
    operation = await load(fleet, checkpoint("new"), "a-2")
    assert {result.error.reason for result in operation.stage_results} == {"CHECKPOINT_MISMATCH"}
    assert {result.outcome for result in operation.stage_results} == {OUTCOME_REJECTED}
    assert held(fleet) == [{"math": ("a-1", "lora")}] * 3
    plan = await begin(fleet)  # of scale 2, as the coordinator knows
    await join(fleet, plan)
    await write(fleet, plan, "new")
    assert (await commit(fleet, plan, digest("new"))).state == OPERATION_STATE_OK
    fake_engine.FAULTS.clear()
    config = v.AdapterConfig(lora_rank=4, lora_alpha=4, target_modules=["q_proj"], dtype="torch.float32")
    plan = await begin(fleet, "a-8", adapter_config=config)
    for rank in range(2):
        fake_engine.FAULTS[fleet.specs[0].model_path, rank] = differing
    await write(fleet, plan, "newer")
    ended = await commit(fleet, plan, digest("newer"))
    assert {result.slot: result.error.reason for result in ended.stage_results}["b"] == "CHECKPOINT_MISMATCH"
    assert recorded(fleet) == [("math", "a-7")]


async def test_a_request_waits_for_those_that_have_it(make_fleet: Callable, checkpoint: Checkpoint) -> None:
    async with make_fleet(a=1, b=1, heal=False) as fleet, await aio.connect(fleet.server.address) as client:
        path = checkpoint("lora")
        await load(fleet, path)
        (Path(path) / "weights.txt").write_text("written over")
        await restart(fleet, "a")
        await eventually(lambda: fleet.stage("a").routable)
        assert not fleet.stage("a").report.adapters
        header = RequestHeader(target=Target(slots=["b"]))
        await fleet.stub.PauseGeneration(v.PauseGenerationRequest(header=header))
        with pytest.raises(RlctlError, match="a without adapter 'math', b PAUSED") as caught:
            await client.generate("x", adapter="math", max_new_tokens=2, timeout_s=0.3)
        assert caught.value.reason is Reason.NO_ROUTABLE_STAGE
        assert (await client.generate("x", max_new_tokens=2)).slot == "a"
        waiting = asyncio.create_task(client.generate("x", adapter="math", max_new_tokens=2))
        await asyncio.sleep(0.1)
        await fleet.stub.ContinueGeneration(v.ContinueGenerationRequest(header=header))
        assert (await waiting).slot == "b"
        with pytest.raises(RlctlError) as caught:
            await client.generate("x", adapter="physics")
        assert caught.value.reason is Reason.ADAPTER_NOT_FOUND


def _operations(fleet: InProcessFleet) -> list[Operation]:
    return [run.operation for run in fleet.server.coordinator.operations.newest_first("", 0)]


async def test_what_came_over_a_group_cannot_be_read_again(fleet: InProcessFleet) -> None:
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    await commit(fleet, plan, digest("w1"))
    await restart(fleet, "a")
    assert await not_generated(fleet, "a") is Reason.ADAPTER_NOT_FOUND
    assert {span.adapter_version for span in (await generate(fleet, "b")).versions} == {"a-7"}


async def test_tensors_take_the_way_of_every_update(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    await load(fleet, checkpoint("lora"))
    before = version_of(fleet)
    plan = await begin(fleet)
    assert (plan.version.label, plan.version.sequence) == before, "the base weights stay"
    await join(fleet, plan)
    await write(fleet, plan, "w1", "w2")
    assert held(fleet) == [{"math": ("a-1", "lora")}] * 3, "staged beside the old one"
    operation = await commit(fleet, plan, digest("w1,w2"))
    assert operation.state == OPERATION_STATE_OK
    assert {r.verified for r in operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    assert held(fleet) == [{"math": ("a-7", "w1,w2")}] * 3
    assert (recorded(fleet), version_of(fleet)) == ([("math", "a-7")], before)
    assert {engine.weights for engine in engines(fleet)} == {"one"}
    plan = await begin(fleet, "a-8")
    await write(fleet, plan, "w3")
    wrong = await commit(fleet, plan, digest("another"))
    assert {result.error.reason for result in wrong.stage_results} == {"DIGEST_MISMATCH"}
    assert held(fleet) == [{"math": ("a-7", "w1,w2")}] * 3
    assert all(fleet.stage(slot).routable for slot in "ab"), "never DIRTY"


@pytest.mark.parametrize("apply", [v.APPLY_MODE_UNSPECIFIED, v.APPLY_MODE_STAGED])
async def test_its_update_stops_the_requests_that_use_it_and_no_others(
    make_fleet: Callable, checkpoint: Checkpoint, apply: int
) -> None:
    async with make_fleet(a=1) as fleet:
        await load(fleet, checkpoint("lora"))
        other = v.LoadAdapterRequest(name="physics", path=checkpoint("other"), version="p-1")
        assert (await fleet.stub.LoadAdapter(other)).state == OPERATION_STATE_OK
        using = asyncio.create_task(generate(fleet, "a", tokens=3000))
        beside = [asyncio.create_task(generate(fleet, "a", name, tokens=300)) for name in ("", "physics")]
        engine = engines(fleet)[0]
        await eventually(lambda: len(engine._running) == 3)
        gate = Held(fleet, "update_weights_from_distributed")
        plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT), apply=apply)
        await join(fleet, plan)
        writing = asyncio.create_task(write(fleet, plan, "w1"))
        await gate.begun.wait()
        assert fleet.stage("a").routable
        for name in ("", "physics", "math"):  # while its tensors are on their way
            await generate(fleet, "a", name)
        gate.may_end.set()
        await writing
        gate = Held(fleet, "commit_update")
        committing = asyncio.create_task(commit(fleet, plan, digest("w1")))
        await gate.begun.wait()
        for name in ("", "physics"):  # while it is replaced
            await generate(fleet, "a", name)
        assert await not_generated(fleet, "a") is Reason.STAGE_NOT_SERVING
        assert not using.done()
        gate.may_end.set()
        assert (await committing).state == OPERATION_STATE_OK
        assert {span.adapter_version for span in (await using).versions} == {"a-1", "a-7"}
        assert {each.finish_reason.type for each in await asyncio.gather(*beside)} == {rollout.FINISH_TYPE_LENGTH}
        assert {span.adapter_version for span in (await generate(fleet, "a")).versions} == {"a-7"}


async def test_what_was_replaced_elsewhere_is_not_told_of_while_its_update_is_aborted(
    make_fleet: Callable, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks go on with the old version before the stage has their results."""
    run, aborted = Relay.run, asyncio.Event()

    async def slowly(relay: Relay, verb: Verb, request: Any, call: Call) -> Any:
        results = await run(relay, verb, request, call)
        if verb.name == "AbortUpdate":
            aborted.set()
            await asyncio.sleep(0.5)
        return results

    monkeypatch.setattr(Relay, "run", slowly)
    async with make_fleet(a=1) as fleet:
        await load(fleet, checkpoint("lora"))
        told = []

        async def use() -> None:
            address = fleet.stage("a").registration.rollout_address
            async with open_channel(address) as channel:
                async for part in RolloutServiceStub(channel).GenerateStream(_request("math", 100_000)):
                    told.extend((span.adapter_version, aborted.is_set()) for span in part.samples[0].versions)

        using = asyncio.create_task(use())
        await eventually(lambda: bool(told))
        failing(fleet, "commit_update", OUTCOME_REJECTED, tp_size=1)
        plan = await begin(fleet, options=v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT))
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        await commit(fleet, plan, digest("w1"))
        assert recorded(fleet) == [("math", "a-7")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await using
        assert from_grpc(caught.value).reason is Reason.STAGE_NOT_SERVING
        assert ("a-1", True) not in told


async def test_without_a_pause_no_request_with_it_is_taken_until_its_update_ends(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await load(fleet, checkpoint("lora"))
    plan = await begin(fleet)
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    for slot in "ab":
        assert await not_generated(fleet, slot) is Reason.STAGE_NOT_SERVING
        await generate(fleet, slot, "")
    await fleet.stub.AbortWeightUpdate(
        u.AbortWeightUpdateRequest(update_id=plan.update_id, fencing_token=plan.fencing_token, reason="test")
    )
    for slot in "ab":
        assert {span.adapter_version for span in (await generated_soon(fleet, slot)).versions} == {"a-1"}


async def test_a_target_that_cannot_be_sealed_keeps_the_old_one_and_so_do_all(
    fleet: InProcessFleet, checkpoint: Checkpoint
) -> None:
    await load(fleet, checkpoint("lora"))
    failing(fleet, "seal_update", OUTCOME_REJECTED)
    operation = await load(fleet, checkpoint("new"), "a-2")
    assert operation.state == OPERATION_STATE_FAILED
    assert held(fleet) == [{"math": ("a-1", "lora")}] * 3
    for slot in "ab":
        assert {span.adapter_version for span in (await generated_soon(fleet, slot)).versions} == {"a-1"}


async def test_requests_that_use_it_are_not_pulled_away_from_under(
    make_fleet: Callable, checkpoint: Checkpoint
) -> None:
    async with make_fleet(a=1) as fleet:
        await load(fleet, checkpoint("lora"))
        using = asyncio.create_task(generate(fleet, "a", tokens=100_000))
        beside = asyncio.create_task(generate(fleet, "a", "", tokens=300))
        engine = engines(fleet)[0]
        await eventually(lambda: len(engine._running) == 2)
        refused = await load(fleet, checkpoint("new"), "a-2")
        assert refused.error.reason == "ACTIVE_REQUESTS"
        unloaded = await fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math"))
        assert (unloaded.state, unloaded.error.reason) == (OPERATION_STATE_FAILED, "ACTIVE_REQUESTS")
        assert recorded(fleet) == [("math", "a-1")]
        replaced = await load(fleet, checkpoint("new"), "a-2", abort_requests=True)
        assert replaced.state == OPERATION_STATE_OK
        assert (await using).finish_reason.type == rollout.FINISH_TYPE_ABORT
        assert (await beside).finish_reason.type == rollout.FINISH_TYPE_LENGTH, "it was not paused, ended or retracted"


async def test_unloading(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    error = await refusal(fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math")))
    assert (error.reason, error.field) == (Reason.ADAPTER_NOT_FOUND, "name")
    await load(fleet, checkpoint("lora"))
    operation = await fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math"))
    assert operation.state == OPERATION_STATE_OK
    assert (held(fleet), recorded(fleet), list(operation.adapters)) == ([{}] * 3, [], [])
    assert await not_generated(fleet, "b") is Reason.ADAPTER_NOT_FOUND
    await load(fleet, checkpoint("lora"))
    failing(fleet, "unload_adapter", OUTCOME_REJECTED)
    partial = await fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math"))
    assert partial.state == OPERATION_STATE_PARTIAL
    assert not fleet.stages["b"]._stage.facts.admitted_adapters, "told before the answer"
    assert await not_generated(fleet, "b") is Reason.ADAPTER_NOT_FOUND, "no longer the model's"
    again = await fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math"))
    assert (again.state, list(again.targets)) == (OPERATION_STATE_FAILED, ["b"])
    fake_engine.FAULTS.clear()
    await eventually(lambda: held(fleet) == [{}] * 3)


async def test_an_adapter_that_stays_on_record_may_be_reloaded(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    await load(fleet, checkpoint("lora"))
    async with full_disk(fleet, "model"):
        unloaded = await fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math"))
    assert (unloaded.state, unloaded.error.reason) == (OPERATION_STATE_UNKNOWN, "JOURNAL_FAILED")
    for result in unloaded.stage_results:
        assert {result.outcome, *(rank.outcome for rank in result.rank_results)} == {OUTCOME_UNKNOWN}
        assert result.error.message == (
            "unloaded, but the adapter is still the model's, and a heal may load it again: no space is left"
        )
    await eventually(lambda: held(fleet) == [{"math": ("a-1", "lora")}] * 3, 10)
    unloaded = await fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math"))
    assert (unloaded.state, recorded(fleet)) == (OPERATION_STATE_OK, [])


async def test_a_stage_that_is_out_of_reach_serves_no_adapter_after_it_was_unloaded(
    make_fleet: Callable, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_links, "DRIFT_S", 0.1)
    monkeypatch.setattr(commander, "PING_EVERY_S", 0.02)  # leases run from the pongs
    async with make_fleet(a=1, b=1, lease_s=0.3) as fleet:
        await load(fleet, checkpoint("lora"))
        slot = fleet.server.coordinator.roster.slots["b"]
        async with unreachable(fleet, "b"):
            assert (await generate(fleet, "b")).output_ids, "its lease lasts"
            operation = await fleet.stub.UnloadAdapter(v.UnloadAdapterRequest(name="math"))
            assert fleet.server.coordinator._clock.now() >= slot.lease_until
            assert await not_generated(fleet, "b") is Reason.STAGE_NOT_SERVING
            found = {result.slot: result.outcome for result in operation.stage_results}
            assert found["a"] == OUTCOME_APPLIED
            assert found.get("b") != OUTCOME_APPLIED
        await eventually(lambda: held(fleet) == [{}] * 2)
        await eventually(lambda: fleet.stage("b").routable)


ROLLING = {"apply": v.APPLY_MODE_STAGED, "max_unavailable": 1}


@pytest.mark.parametrize("how", [{}, ROLLING], ids=["in-place", "rolling"])
@pytest.mark.parametrize("drop", [False, True])
async def test_a_base_update_says_what_became_of_them(
    fleet: InProcessFleet, checkpoint: Checkpoint, drop: bool, how: dict[str, int]
) -> None:
    await load(fleet, checkpoint("lora"))
    policy = v.ADAPTER_POLICY_DROP if drop else v.ADAPTER_POLICY_UNSPECIFIED
    options = v.UpdateOptions(adapters=policy, pause=common.PAUSE_MODE_RETRACT)
    request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), weight_version="w", options=options, **how)
    operation = await fleet.stub.UpdateWeightsFromDisk(request)
    assert operation.state == OPERATION_STATE_OK
    assert [adapter.name for adapter in operation.adapters] == ([] if drop else ["math"])
    assert list(operation.dropped_adapters) == (["math"] if drop else [])
    assert recorded(fleet) == ([] if drop else [("math", "a-1")])
    assert [set(adapters) for adapters in held(fleet)] == [set() if drop else {"math"}] * 3
    for slot in "ab":
        if drop:
            assert await not_generated(fleet, slot) is Reason.ADAPTER_NOT_FOUND
        else:
            await generate(fleet, slot)


async def test_a_new_coordinator_knows_them(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    await load(fleet, checkpoint("lora"))
    address = fleet.server.address
    await fleet.channel.close()
    await fleet.server.stop()
    await fleet.start_coordinator(address)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    assert recorded(fleet) == [("math", "a-1")]
    for slot in "ab":
        await generate(fleet, slot)


async def test_what_a_group_does_not_bring_to_an_engine_is_refused_at_the_begin(fleet: InProcessFleet) -> None:
    by = [common.TRANSPORT_DISK, common.TRANSPORT_SHARED_MEMORY]
    slot = fleet.server.coordinator.roster.slots["b"]
    slot.record.registration.capabilities.adapter_transports.extend(by)
    refused = await refusal(begin(fleet))
    assert (refused.reason, refused.field) == (Reason.UNSUPPORTED, "path")
    assert "'fake' takes no adapter over a group" in refused.message
    assert [fleet.stage(name).report.update_id for name in "ab"] == ["", ""]
    slot.record.registration.capabilities.adapter_transports.append(common.TRANSPORT_TORCH_GLOO)
    assert (await begin(fleet)).update_id


async def test_bad_requests_are_refused_by_field(fleet: InProcessFleet, checkpoint: Checkpoint) -> None:
    path = checkpoint("lora")
    header = RequestHeader(target=Target(slots=["a"]))
    for request, field in (
        (v.LoadAdapterRequest(path=path), "name"),
        (v.LoadAdapterRequest(name="a\nb", path=path), "name"),
        (v.LoadAdapterRequest(name="math"), "path"),
        (v.LoadAdapterRequest(name="math", path=path, header=header), "header.target"),
        (v.UnloadAdapterRequest(), "name"),
        (v.UnloadAdapterRequest(name="math", header=header), "header.target"),
    ):
        method = type(request).__name__.removesuffix("Request")
        assert (await refusal(getattr(fleet.stub, method)(request))).field == field
    for fields, field in (
        ({"adapter": ""}, "adapter"),
        ({"adapter_config": None}, "adapter_config"),
        ({"kind": v.UPDATE_KIND_FULL}, "kind"),
        ({"options": v.UpdateOptions(after=v.AFTER_UPDATE_STAY_PAUSED)}, "options.after"),
        ({"rollout": u.RolloutStrategy(max_unavailable=1)}, "rollout.max_unavailable"),
    ):
        assert (await refusal(begin(fleet, **fields))).field == field
    assert held(fleet) == [{}] * 3
    validated = RequestHeader(validate_only=True)
    answer = await fleet.stub.LoadAdapter(v.LoadAdapterRequest(name="math", path=path, header=validated))
    assert answer.validate_only
    assert held(fleet) == [{}] * 3
