"""Updates that are verified by keyed digests: the key's way, what it finds, and where both functions meet."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_steps import restart_coordinator
from updating import abort, begin, commit, digest, join, refusal, restart, version_of, weights, write
from waiting import eventually

from rlctl.contract.digests import key_of, with_key
from rlctl.contract.errors import OperationFailed, Reason
from rlctl.contract.fingerprints import fingerprints
from rlctl.coordinator.healing import sources
from rlctl.engine import Call, EngineInfo
from rlctl.sdk import aio
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.coordinator_pb2 import GetFleetRequest, HealStageRequest, ListOperationsRequest
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, Operation, RankResult

KEYED = v.UpdateOptions(digest=v.DIGEST_FUNCTION_KEYED)
PREFERRED = v.UpdateOptions(digest=v.DIGEST_FUNCTION_PREFER_KEYED)
RECEIVED = common.VERIFICATION_LEVEL_RECEIVED
AS_VERIFIED = v.CheckWeightsRequest(digest=v.DIGEST_FUNCTION_AS_VERIFIED)


def keyed(text: str, key: bytes) -> str:
    return with_key(hashlib.sha256(key + text.encode()).hexdigest(), key)


async def prepared(fleet: InProcessFleet, text: str = "w1", **fields: Any) -> u.BeginWeightUpdateResponse:
    plan = await begin(fleet, text, **{"options": KEYED} | fields)
    await join(fleet, plan)
    await write(fleet, plan, text)
    return plan


async def update(fleet: InProcessFleet, text: str = "w1", **fields: Any) -> Operation:
    plan = await prepared(fleet, text)
    return await commit(fleet, plan, keyed(text, plan.digest_key), **fields)


def held(fleet: InProcessFleet, text: str) -> None:
    """Something else than rlctl writes into the weights of b."""
    fleet.stages["b"]._engine.weights = text  # type: ignore[attr-defined]
    fleet.workers["b", 1]._follower._engine.weights = text  # type: ignore[attr-defined]


async def test_an_update_is_verified_by_a_key_of_its_own(fleet: InProcessFleet) -> None:
    first = await update(fleet, "w1")
    assert first.state == OPERATION_STATE_OK
    assert {result.verified for result in first.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    key = key_of(first.model_digest)
    assert first.model_digest == keyed("w1", key)
    assert len(key) == 16
    again = await update(fleet, "w2")
    assert key_of(again.model_digest) not in (b"", key)
    (model,) = (await fleet.stub.GetFleet(GetFleetRequest())).models
    assert model.model_digest == again.model_digest


async def test_without_being_asked_for_it_an_update_is_verified_by_sha256(fleet: InProcessFleet) -> None:
    plan = await prepared(fleet, options=v.UpdateOptions())
    assert plan.digest_key == b""
    assert (await commit(fleet, plan, digest("w1"))).model_digest == digest("w1")


async def test_a_wrong_rank_is_named(fleet: InProcessFleet) -> None:
    async def change(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "commit_update" and engine.config.tp_size == 2:
            engine.weights += " wrong"

    fake_engine.FAULTS[fleet.specs[0].model_path, 1] = change
    plan = await prepared(fleet)
    said = {"weights": keyed("w1", plan.digest_key)[:64]}
    operation = await commit(fleet, plan, keyed("w1", plan.digest_key), fingerprints=fingerprints(said))
    assert operation.state == OPERATION_STATE_FAILED
    (wrong,) = [result for result in operation.stage_results if result.error.reason == "DIGEST_MISMATCH"]
    assert (wrong.slot, wrong.error.metadata["tensor"], wrong.error.metadata["ranks"]) == ("b", "weights", "1")
    assert version_of(fleet) == ("initial", 1)


async def test_replicas_are_compared_by_the_key(fleet: InProcessFleet) -> None:
    plan = await prepared(fleet)
    operation = await commit(fleet, plan)
    assert operation.state == OPERATION_STATE_OK
    assert {result.verified for result in operation.stage_results} == {common.VERIFICATION_LEVEL_REPLICA}
    assert operation.model_digest == keyed("w1", plan.digest_key)


async def test_what_comes_is_digested_by_the_key(fleet: InProcessFleet) -> None:
    options = v.UpdateOptions(digest=v.DIGEST_FUNCTION_KEYED, verify=common.VERIFICATION_LEVEL_RECEIVED)
    plan = await prepared(fleet, options=options)
    operation = await commit(fleet, plan, keyed("w1", plan.digest_key))
    assert operation.state == OPERATION_STATE_OK
    took = {rank.weights.received_digest for result in operation.stage_results for rank in result.rank_results}
    assert took == {keyed("w1", plan.digest_key)}


@pytest.mark.parametrize("made_with", ["sha256", "another key"])
@pytest.mark.parametrize("field", ["expected_digest", "sent_digest"])
async def test_a_digest_that_was_made_otherwise_is_refused(fleet: InProcessFleet, field: str, made_with: str) -> None:
    plan = await prepared(fleet)
    right = keyed("w1", plan.digest_key)
    other = digest("w1") if made_with == "sha256" else keyed("w1", bytes(16))
    expected, sent = (other, right) if field == "expected_digest" else (right, other)
    error = await refusal(commit(fleet, plan, expected, sent_digest=sent))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, field)
    assert plan.digest_key.hex()[:8] in error.message
    # The update is as it was.
    assert (await commit(fleet, plan, right)).state == OPERATION_STATE_OK


async def test_a_keyed_digest_in_an_update_by_sha256_is_refused(fleet: InProcessFleet) -> None:
    plan = await prepared(fleet, options=v.UpdateOptions())
    error = await refusal(commit(fleet, plan, keyed("w1", bytes(16))))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "expected_digest")


async def test_a_stage_that_computes_none_refuses_it_before_anything_is_paused(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.server.coordinator.roster.slots["b"].record.registration.capabilities.keyed_digests = False
    error = await refusal(begin(fleet, options=KEYED))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "options.digest")
    assert "b's engine" in error.message
    assert not any(stage.report.paused for stage in (await fleet.stub.GetFleet(GetFleetRequest())).stages)


BY_SHA256 = pytest.mark.parametrize(
    "fields",
    [
        {"kind": v.UPDATE_KIND_ADAPTER, "adapter": "math", "adapter_config": v.AdapterConfig(lora_rank=1)},
        {"path": u.DATA_PATH_DISK},
    ],
    ids=["adapter", "disk"],
)


@BY_SHA256
async def test_what_is_digested_by_sha256_only_refuses_it(fleet: InProcessFleet, fields: dict[str, Any]) -> None:
    error = await refusal(begin(fleet, options=KEYED, **fields))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "options.digest")


async def test_a_preferred_keyed_digest_is_keyed_where_every_stage_computes_it(fleet: InProcessFleet) -> None:
    plan = await prepared(fleet, options=PREFERRED)
    operation = await commit(fleet, plan, keyed("w1", plan.digest_key))
    assert (operation.state, len(key_of(operation.model_digest))) == (OPERATION_STATE_OK, 16)
    slot = fleet.server.coordinator.roster.slots["b"]
    slot.record.registration.capabilities.keyed_digests = False
    assert (await begin(fleet, "w2", options=PREFERRED)).digest_key == b""


@BY_SHA256
async def test_a_preferred_keyed_digest_is_a_sha256_of_adapters_and_checkpoints(
    fleet: InProcessFleet, fields: dict[str, Any]
) -> None:
    assert (await begin(fleet, options=PREFERRED, **fields)).digest_key == b""


@pytest.mark.parametrize("options", [KEYED, v.UpdateOptions()], ids=["keyed", "sha256"])
async def test_a_preferred_keyed_digest_of_a_delta_is_that_of_its_base(
    fleet: InProcessFleet, options: v.UpdateOptions
) -> None:
    plan = await prepared(fleet, options=options)
    digest_of_base = keyed("w1", plan.digest_key) if plan.digest_key else digest("w1")
    base = await commit(fleet, plan, digest_of_base)
    delta = await begin(fleet, "w2", kind=v.UPDATE_KIND_DELTA, base=base.weight_version, options=PREFERRED)
    assert delta.digest_key == plan.digest_key


async def test_a_delta_keeps_the_key_of_its_base(fleet: InProcessFleet) -> None:
    base = await update(fleet, "w1")
    plan = await begin(fleet, "w1-again", kind=v.UPDATE_KIND_DELTA, base=base.weight_version)
    assert plan.digest_key == key_of(base.model_digest)
    other = v.UpdateOptions(digest=v.DIGEST_FUNCTION_SHA256)
    operation = await commit(fleet, plan, base.model_digest)
    assert (operation.state, operation.model_digest) == (OPERATION_STATE_OK, base.model_digest)
    error = await refusal(begin(fleet, "other", kind=v.UPDATE_KIND_DELTA, base=operation.weight_version, options=other))
    assert (error.reason, error.field) == (Reason.FIELD_CONFLICT, "options.digest")
    # Nothing was digested at the targets of the base: its key is known all the same.
    plan = await prepared(fleet, "w2", options=v.UpdateOptions(digest=KEYED.digest, verify=RECEIVED))
    received = await commit(fleet, plan, keyed("w2", plan.digest_key))
    assert (received.state, received.model_digest) == (OPERATION_STATE_OK, "")
    later = await begin(fleet, "w3", kind=v.UPDATE_KIND_DELTA, base=received.weight_version)
    assert later.digest_key == plan.digest_key


async def test_a_delta_to_a_version_by_sha256_is_not_keyed(fleet: InProcessFleet) -> None:
    base = common.WeightVersion(label="initial", sequence=1)
    error = await refusal(begin(fleet, kind=v.UPDATE_KIND_DELTA, base=base, options=KEYED))
    assert (error.reason, error.field) == (Reason.FIELD_CONFLICT, "options.digest")
    assert (await begin(fleet, kind=v.UPDATE_KIND_DELTA, base=base)).digest_key == b""


async def test_a_check_goes_by_the_function_that_the_version_was_verified_by(fleet: InProcessFleet) -> None:
    operation = await update(fleet)
    checked = await fleet.stub.CheckWeights(AS_VERIFIED)
    found = {rank.check.model_digest for result in checked.stage_results for rank in result.rank_results}
    assert found == {operation.model_digest}
    strict = await fleet.stub.CheckWeights(v.CheckWeightsRequest(digest=v.DIGEST_FUNCTION_SHA256))
    found = {rank.check.model_digest for result in strict.stage_results for rank in result.rank_results}
    assert (strict.state, found) == (OPERATION_STATE_OK, {digest("w1")})
    other = await fleet.stub.CheckWeights(v.CheckWeightsRequest(digest_key=bytes(16)))
    found = {rank.check.model_digest for result in other.stage_results for rank in result.rank_results}
    assert (other.state, found) == (OPERATION_STATE_OK, {keyed("w1", bytes(16))})
    assert fleet.stage("b").report.model_digest == operation.model_digest


@pytest.mark.parametrize("function", ["as verified", "sha256"])
async def test_what_something_else_has_written_is_found_by_either_function(
    fleet: InProcessFleet, function: str
) -> None:
    await update(fleet)
    check = AS_VERIFIED if function == "as verified" else v.CheckWeightsRequest()
    held(fleet, "another's")
    (good, bad) = (await fleet.stub.CheckWeights(check)).stage_results
    assert (good.outcome, bad.outcome) == (common.OUTCOME_APPLIED, common.OUTCOME_DIRTY)
    assert bad.error.reason == "DIGEST_MISMATCH"


@pytest.mark.parametrize("during", ["a snapshot", "a staged update"])
async def test_damage_is_no_baseline_of_later_checks_by_sha256(fleet: InProcessFleet, during: str) -> None:
    await update(fleet)
    check = v.CheckWeightsRequest()
    if during == "a snapshot":
        check.action = v.CHECK_ACTION_SNAPSHOT
    else:
        options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)
        await prepared(fleet, "w2", apply=v.APPLY_MODE_STAGED, options=options)
    held(fleet, "another's")
    (good, bad) = (await fleet.stub.CheckWeights(check)).stage_results
    assert (good.outcome, bad.outcome, bad.error.reason) == (
        common.OUTCOME_APPLIED,
        common.OUTCOME_DIRTY,
        "DIGEST_MISMATCH",
    )


async def test_a_sha256_is_no_baseline_if_a_write_ran_beside_its_proof(fleet: InProcessFleet) -> None:
    await update(fleet)
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)
    plan = await begin(fleet, "w2", options=options, apply=v.APPLY_MODE_STAGED)
    await join(fleet, plan)
    writing, proving = asyncio.Event(), asyncio.Event()
    stage = fleet.stages["b"]

    async def overlap(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "update_weights_from_distributed":
            writing.set()
            await proving.wait()
        if name == "check_weights" and call.command_id.endswith("-verified") and not proving.is_set():
            proving.set()
            await eventually(lambda: not stage._writing)

    fake_engine.FAULTS[fleet.specs[1].model_path, 0] = overlap
    written = asyncio.create_task(write(fleet, plan, "w2"))
    await writing.wait()
    held(fleet, "another's")
    await fleet.stub.CheckWeights(v.CheckWeightsRequest())
    await written
    (_, bad) = (await fleet.stub.CheckWeights(v.CheckWeightsRequest())).stage_results
    assert (bad.outcome, bad.error.reason) == (common.OUTCOME_DIRTY, "DIGEST_MISMATCH")


async def test_a_list_of_the_tensors_keeps_sha256(fleet: InProcessFleet) -> None:
    await update(fleet)
    async with await aio.connect(fleet.server.address) as client:
        checked = await client.check_weights(per_tensor=True)
        tensors = {
            tensor.sha256
            for stage in checked.stage_results
            for rank in stage.rank_results
            for tensor in rank.check.model_tensors
        }
        assert tensors == {digest("w1")}
        held(fleet, "another's")
        with pytest.raises(OperationFailed) as caught:
            await client.check_weights(per_tensor=True)
    assert caught.value.reason is Reason.DIGEST_MISMATCH


async def test_a_sha256_of_an_earlier_version_is_forgotten(fleet: InProcessFleet) -> None:
    for text in ("w1", "w2"):
        assert (await update(fleet, text)).state == OPERATION_STATE_OK
        assert (await fleet.stub.CheckWeights(v.CheckWeightsRequest())).state == OPERATION_STATE_OK


@pytest.mark.parametrize("refused_by", ["coordinator", "stage"])
@pytest.mark.parametrize("field", ["digest_key", "expected_digest"])
async def test_a_stage_that_computes_none_is_asked_for_none(fleet: InProcessFleet, refused_by: str, field: str) -> None:
    fields: dict[str, Any] = {"digest_key": bytes(16), "expected_digest": keyed("initial", bytes(16))}
    request = v.CheckWeightsRequest(**{field: fields[field]})
    request.header.target.slots.append("a")
    if refused_by == "coordinator":
        fleet.server.coordinator.roster.slots["a"].record.registration.capabilities.keyed_digests = False
        error = await refusal(fleet.stub.CheckWeights(request))
        assert (error.reason, error.field) == (Reason.UNSUPPORTED, field)
        assert "a's engine" in error.message
        return
    fleet.stages["a"]._stage.registration.capabilities.keyed_digests = False  # type: ignore[attr-defined]
    (result,) = (await fleet.stub.CheckWeights(request)).stage_results
    assert (result.error.reason, result.error.field) == ("UNSUPPORTED", field)


async def test_a_comparison_with_a_keyed_digest_reaches_every_rank(fleet: InProcessFleet) -> None:
    operation = await update(fleet)
    compare = v.CheckWeightsRequest(action=v.CHECK_ACTION_COMPARE, expected_digest=operation.model_digest)
    compared = await fleet.stub.CheckWeights(compare)
    assert compared.state == OPERATION_STATE_OK
    assert [rank.check.matched for result in compared.stage_results for rank in result.rank_results] == [1, 1, 1]


async def test_a_callers_own_key_is_no_stages_digest(fleet: InProcessFleet) -> None:
    options = v.UpdateOptions(digest=v.DIGEST_FUNCTION_KEYED, verify=RECEIVED)
    plan = await prepared(fleet, options=options)
    assert (await commit(fleet, plan, keyed("w1", plan.digest_key))).state == OPERATION_STATE_OK
    await fleet.stub.CheckWeights(v.CheckWeightsRequest(digest_key=bytes(16)))
    assert fleet.stage("b").report.model_digest == ""
    await fleet.stub.CheckWeights(v.CheckWeightsRequest())
    await fleet.until(lambda stages: all(stage.report.model_digest == digest("w1") for stage in stages))


async def test_the_digest_of_a_verification_counts_beside_an_earlier_check(fleet: InProcessFleet) -> None:
    """A check by SHA-256 between commit and verification."""
    checked = asyncio.Event()

    async def check(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "check_weights" and not checked.is_set():
            checked.set()
            stage = fleet.stages["a"]._stage  # type: ignore[attr-defined]
            request = v.CheckWeightsRequest()
            result = RankResult(check=v.CheckReport(model_digest=digest("w1")))
            stage.facts._digested(request, [result])
            assert stage.facts.model_digest == digest("w1")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = check
    operation = await update(fleet)
    assert checked.is_set()
    assert fleet.stages["a"]._stage.facts.model_digest == operation.model_digest  # type: ignore[attr-defined]
    assert fleet.stages["a"]._stage.facts.sha256_digest == digest("w1")  # type: ignore[attr-defined]


async def test_a_checkpoint_has_no_keyed_digest(fleet: InProcessFleet, checkpoint: Callable[[str], str]) -> None:
    request = v.UpdateWeightsFromDiskRequest(
        model_path=checkpoint("two"), weight_version="two", expected_digest=keyed("two", bytes(16))
    )
    error = await refusal(fleet.stub.UpdateWeightsFromDisk(request))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "expected_digest")


async def test_a_check_against_a_keyed_digest_computes_that(fleet: InProcessFleet) -> None:
    """Also of weights that were verified by SHA-256."""
    right = keyed(weights(fleet)[0], bytes(16))
    checked = await fleet.stub.CheckWeights(v.CheckWeightsRequest(expected_digest=right))
    assert {rank.check.model_digest for result in checked.stage_results for rank in result.rank_results} == {right}


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"digest_key": b"short"}, Reason.FIELD_INVALID, "digest_key"),
        ({"digest_key": bytes(16), "action": v.CHECK_ACTION_SNAPSHOT}, Reason.FIELD_CONFLICT, "digest_key"),
        ({"digest_key": bytes(16), "digest": v.DIGEST_FUNCTION_SHA256}, Reason.FIELD_CONFLICT, "digest"),
        ({"digest_key": bytes(16), "expected_digest": "0" * 64}, Reason.FIELD_CONFLICT, "digest_key"),
        ({"digest": v.DIGEST_FUNCTION_KEYED}, Reason.FIELD_REQUIRED, "digest_key"),
        ({"digest": v.DIGEST_FUNCTION_PREFER_KEYED}, Reason.FIELD_INVALID, "digest"),
        ({"digest_key": bytes(16), "adapter": "math"}, Reason.FIELD_CONFLICT, "adapter"),
        ({"digest_key": bytes(16), "model_digest": False}, Reason.FIELD_CONFLICT, "model_digest"),
        (
            {"expected_digest": keyed("x", bytes(16)), "action": v.CHECK_ACTION_PROBE},
            Reason.FIELD_CONFLICT,
            "expected_digest",
        ),
        ({"digest": v.DIGEST_FUNCTION_AS_VERIFIED, "action": v.CHECK_ACTION_SNAPSHOT}, Reason.FIELD_CONFLICT, "digest"),
        ({"digest": v.DIGEST_FUNCTION_AS_VERIFIED, "skip_tensors": ["w"]}, Reason.FIELD_CONFLICT, "digest"),
        ({"digest": v.DIGEST_FUNCTION_AS_VERIFIED, "shadow": True}, Reason.FIELD_CONFLICT, "digest"),
        ({"digest_key": bytes(16), "digest": v.DIGEST_FUNCTION_AS_VERIFIED}, Reason.FIELD_CONFLICT, "digest"),
        ({"digest": v.DIGEST_FUNCTION_AS_VERIFIED, "adapter": "math"}, Reason.FIELD_CONFLICT, "digest"),
        ({"expected_digest": "0" * 64 + "@12"}, Reason.FIELD_INVALID, "expected_digest"),
        ({"expected_digest": "0" * 64 + "@"}, Reason.FIELD_INVALID, "expected_digest"),
    ],
)
async def test_a_check_that_cannot_be_is_refused(
    fleet: InProcessFleet, fields: dict[str, Any], reason: Reason, field: str
) -> None:
    error = await refusal(fleet.stub.CheckWeights(v.CheckWeightsRequest(**fields)))
    assert (error.reason, error.field) == (reason, field)


async def test_a_heal_is_verified_by_the_key_of_the_version(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str]
) -> None:
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        operation = await update(fleet)
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        healed = await fleet.stub.HealStage(HealStageRequest(slots=["a"], checkpoint=checkpoint("w1")))
        assert healed.state == OPERATION_STATE_OK, healed.error
        (result,) = healed.stage_results
        assert {rank.check.model_digest for rank in result.rank_results} <= {operation.model_digest, ""}
        assert fleet.stage("a").report.model_digest == operation.model_digest
        assert set(weights(fleet)) == {"w1"}


async def test_a_stage_that_computes_no_keyed_digest_is_healed_by_the_sha256_of_another(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        await update(fleet)
        start, answer = FakeEngine.start, FakeEngine.check_weights

        async def without(self: FakeEngine, *setup: Any) -> EngineInfo:
            info = await start(self, *setup)
            info.capabilities.keyed_digests = False
            return info

        async def older(self: FakeEngine, request: v.CheckWeightsRequest, call: Call) -> v.CheckReport:
            if self.config.tp_size == 1:  # one that does not know the field
                request.digest_key = b""
            return await answer(self, request, call)

        monkeypatch.setattr(FakeEngine, "start", without)
        monkeypatch.setattr(FakeEngine, "check_weights", older)
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        heal = HealStageRequest(slots=["a"], checkpoint=checkpoint("w1"))
        registered = (fleet.server.coordinator.roster.slots["a"].record, fleet.stages["a"]._stage)
        # An engine that reports keyed digests among its capabilities, and answers by SHA-256.
        for each in registered:
            each.registration.capabilities.keyed_digests = True  # type: ignore[attr-defined]
        error = (await fleet.stub.HealStage(heal)).stage_results[0].error
        assert error.reason == "VERIFICATION_UNREACHABLE"
        assert "answered with another digest function than requested" in error.message
        assert not fleet.stage("a").routable
        for each in registered:
            each.registration.capabilities.keyed_digests = False  # type: ignore[attr-defined]
        with monkeypatch.context() as alone:
            alone.setattr(sources, "witnesses", lambda *_: [])
            error = await refusal(fleet.stub.HealStage(heal))
        assert (error.reason, error.field) == (Reason.UNHEALABLE, "slots")
        assert "a's engine does not compute the keyed digest of version 'w1'" in error.message
        wrong = await fleet.stub.HealStage(HealStageRequest(slots=["a"], checkpoint=checkpoint("w2")))
        assert wrong.stage_results[0].error.reason == "DIGEST_MISMATCH"
        healed = await fleet.stub.HealStage(heal)
        assert healed.state == OPERATION_STATE_OK, healed
        assert fleet.stage("a").report.model_digest == digest("w1")
        assert fleet.stage("a").routable


async def test_the_key_outlives_the_coordinator(fleet: InProcessFleet) -> None:
    operation = await update(fleet)
    await restart_coordinator(fleet)
    await fleet.until(lambda stages: all(stage.routable for stage in stages))
    checked = await fleet.stub.CheckWeights(AS_VERIFIED)
    assert checked.state == OPERATION_STATE_OK
    found = {rank.check.model_digest for result in checked.stage_results for rank in result.rank_results}
    assert found == {operation.model_digest}


def stored(fleet: InProcessFleet, text: str) -> None:
    """Write other weights into the checkpoint that the engines load at their start."""
    (Path(fleet.specs[0].model_path) / "weights.txt").write_text(text)


@pytest.mark.parametrize("starts_with", ["a SHA-256", "no digest"])
async def test_a_restarted_stage_with_the_contents_of_the_version_is_adopted(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, starts_with: str
) -> None:
    """Nothing heals here, and no checkpoint is a heal source."""
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        operation = await update(fleet)
        stored(fleet, "w1")
        if starts_with == "no digest":
            start = FakeEngine.start

            async def without(self: FakeEngine, *setup: Any) -> EngineInfo:
                return replace(await start(self, *setup), model_digest="")

            monkeypatch.setattr(FakeEngine, "start", without)
        await asyncio.gather(*(restart(fleet, slot) for slot in "ab"))
        await fleet.until(lambda stages: all(stage.routable and stage.incarnation == 2 for stage in stages))
        assert version_of(fleet) == ("w1", 2)
        # The stages are checked by the function of the version from now on.
        await fleet.until(lambda stages: all(s.report.model_digest == operation.model_digest for s in stages))
        checked = await fleet.stub.CheckWeights(AS_VERIFIED)
        found = {rank.check.model_digest for result in checked.stage_results for rank in result.rank_results}
        assert found == {operation.model_digest}
        held(fleet, "another's")
        check = v.CheckWeightsRequest() if starts_with == "a SHA-256" else AS_VERIFIED
        outcomes = [result.outcome for result in (await fleet.stub.CheckWeights(check)).stage_results]
        assert outcomes == [common.OUTCOME_APPLIED, common.OUTCOME_DIRTY]


def checks_of(fleet: InProcessFleet, delay_s: float = 0.0) -> list[int]:
    """Return a list that gets the rank of each check of weights. A check takes ``delay_s`` longer."""
    ranks: list[int] = []

    async def note(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "check_weights":
            ranks.append(engine.config.rank)
            await asyncio.sleep(delay_s)

    for rank in range(2):
        fake_engine.FAULTS[fleet.specs[0].model_path, rank] = note
    return ranks


async def test_no_heal_begins_before_the_digest_of_the_first_weights(
    fleet: InProcessFleet, checkpoint: Callable[[str], str]
) -> None:
    await update(fleet)
    fleet.server.coordinator.roster.models["actor"].record.checkpoint = checkpoint("w1")
    stored(fleet, "w1")
    ranks = checks_of(fleet, delay_s=0.5)
    await restart(fleet, "a")
    await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].routable)
    assert ranks
    assert not (await fleet.stub.ListOperations(ListOperationsRequest(verb="HealStage"))).operations


async def test_no_digest_of_first_weights_begins_during_an_update(make_fleet: Callable[..., Any]) -> None:
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        await update(fleet)
        stored(fleet, "w1")
        plan = await begin(fleet, version="next")
        ranks = checks_of(fleet)
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        await asyncio.sleep(0.3)
        assert not ranks
        await abort(fleet, plan)
        await fleet.until(lambda stages: stages[0].routable)
        assert ranks == [0]


@pytest.mark.parametrize("because", ["the contents differ", "the check fails"])
async def test_a_restarted_stage_that_is_not_shown_to_have_the_version_is_healed(
    fleet: InProcessFleet, checkpoint: Callable[[str], str], because: str
) -> None:
    operation = await update(fleet)
    fleet.server.coordinator.roster.models["actor"].record.checkpoint = checkpoint("w1")
    stored(fleet, "w1" if because == "the check fails" else "other")
    failed = asyncio.Event()

    async def fail(engine: FakeEngine, name: str, call: Call) -> None:
        if name == "check_weights" and because == "the check fails" and not failed.is_set():
            failed.set()
            raise Reason.ENGINE_FAILED.error("out of order")

    fake_engine.FAULTS[fleet.specs[0].model_path, 0] = fail
    await restart(fleet, "a")
    await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].routable)
    assert set(weights(fleet)) == {"w1"}
    assert fleet.stage("a").report.model_digest == operation.model_digest
    operations = (await fleet.stub.ListOperations(ListOperationsRequest(verb="HealStage"))).operations
    assert [each.state for each in operations] == [OPERATION_STATE_OK]


async def test_a_stage_of_other_contents_waits_for_the_operator_as_before(
    make_fleet: Callable[..., Any], checkpoint: Callable[[str], str]
) -> None:
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        await update(fleet)
        checks: list[str] = []

        async def noted(engine: FakeEngine, name: str, call: Call) -> None:
            checks.extend([name] if name == "check_weights" else [])

        fake_engine.FAULTS[fleet.specs[0].model_path, 0] = noted
        await restart(fleet, "a")
        await fleet.until(lambda stages: stages[0].incarnation == 2 and stages[0].state == common.STAGE_STATE_STALE)
        await eventually(lambda: bool(checks))
        fleet.server.coordinator.updates.look_after_all(common.Target())
        await asyncio.sleep(0.2)
        assert checks == ["check_weights"], "the contents are digested once for each key"
        assert not fleet.stage("a").routable
        healed = await fleet.stub.HealStage(HealStageRequest(slots=["a"], checkpoint=checkpoint("w1")))
        assert healed.state == OPERATION_STATE_OK, healed.error
