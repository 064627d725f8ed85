"""Verifying an update: the levels, what a mismatch names, deltas, and engines that answer for all of their ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fleet_steps import restart_coordinator
from updating import abort, begin, commit, digest, fault, join, refusal, version_of, weights, write

from rlctl.contract.errors import Reason
from rlctl.contract.fingerprints import fingerprints
from rlctl.engine import Call
from rlctl.testing import fake_engine
from rlctl.testing.fake_engine import FakeEngine, logprobs
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import update_pb2 as u
from rlctl.v1 import verbs_pb2 as v
from rlctl.v1.coordinator_pb2 import GetFleetRequest
from rlctl.v1.results_pb2 import OPERATION_STATE_FAILED, OPERATION_STATE_OK, Operation, StageResult

PROMPTS = ([1, 2, 3], [4, 5])


def spoil(fleet: InProcessFleet, method: str, *ranks: int, tp_size: int = 0) -> None:
    """Other weights at these ranks once this method is called, in all stages or those of this size."""

    async def change(engine: FakeEngine, name: str, call: Call) -> None:
        if name == method and tp_size in (0, engine.config.tp_size):
            engine.weights += f" at {engine.config.tp_size}"
            if engine.received_names is not None:
                engine.received_names += ["another"]

    for rank in ranks:
        fake_engine.FAULTS[fleet.specs[0].model_path, rank] = change


def probe_of(text: str, tolerance: float = 0.01) -> v.Probe:
    prompts = [v.ProbePrompt(token_ids=prompt, logprobs=logprobs(text, prompt)) for prompt in PROMPTS]
    return v.Probe(prompts=prompts, tolerance=tolerance)


async def update(
    fleet: InProcessFleet,
    *,
    verify: int = 0,
    probe: v.Probe | None = None,
    expected: str = digest("w1"),
    **fields: object,
) -> Operation:
    plan = await begin(fleet, options=v.UpdateOptions(verify=verify, probe=probe))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    return await commit(fleet, plan, expected, **fields)


def result_of(operation: Operation, slot: str) -> StageResult:
    return next(result for result in operation.stage_results if result.slot == slot)


async def test_a_mismatch_names_the_tensor_the_rank_and_the_stage(fleet: InProcessFleet) -> None:
    spoil(fleet, "commit_update", 1)
    operation = await update(fleet, fingerprints=fingerprints({"weights": digest("w1")}))
    assert operation.state == OPERATION_STATE_FAILED
    assert "b: " in operation.error.message
    wrong = result_of(operation, "b")
    assert wrong.error.reason == "DIGEST_MISMATCH"
    assert (wrong.error.metadata["tensor"], wrong.error.metadata["ranks"]) == ("weights", "1")
    assert "of 1 tensors only weights differs, at rank 1" in wrong.error.message
    assert [rank.check.difference.part.differs for rank in wrong.rank_results] == [False, True]
    assert version_of(fleet) == ("initial", 1)


async def test_without_fingerprints_a_target_that_is_right_says_which_tensor_differs(make_fleet: Callable) -> None:
    async with make_fleet(a=1, b=2) as fleet:
        spoil(fleet, "commit_update", 0, 1, tp_size=2)
        wrong = result_of(await update(fleet, expected=digest("w1")), "b")
        assert wrong.error.reason == "DIGEST_MISMATCH"
        assert "the source sent" in wrong.error.message
        assert (wrong.error.metadata["tensor"], wrong.error.metadata["ranks"]) == ("weights", "0,1")
    async with make_fleet(c=1) as fleet:
        spoil(fleet, "commit_update", 0)
        wrong = result_of(await update(fleet, expected=digest("w1")), "c")
        assert wrong.error.reason == "DIGEST_MISMATCH"
        assert "tensor" not in wrong.error.metadata, "there is nothing to compare with"


async def test_replicas_that_disagree_name_the_tensor(fleet: InProcessFleet) -> None:
    spoil(fleet, "commit_update", 0, 1, tp_size=2)
    operation = await update(fleet, verify=common.VERIFICATION_LEVEL_REPLICA, expected="")
    assert operation.state == OPERATION_STATE_FAILED
    named = [result.error.metadata.get("tensor", "") for result in operation.stage_results]
    assert sorted(named) == ["", "weights"], "the first one is what the others are compared with"


async def test_a_replica_that_is_left_alone_is_not_verified_by_itself(fleet: InProcessFleet) -> None:
    fault(fleet, 1, 2, "commit_update", Reason.ENGINE_FAILED.error("no"))
    plan = await begin(fleet, options=v.UpdateOptions(verify=common.VERIFICATION_LEVEL_REPLICA, quorum=1))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    operation = await commit(fleet, plan)
    assert operation.state == OPERATION_STATE_FAILED
    assert result_of(operation, "a").error.reason == "VERIFICATION_UNREACHABLE"
    assert "no other replica is left to compare a with" in result_of(operation, "a").error.message
    assert version_of(fleet) == ("initial", 1)


async def test_level_received_compares_what_each_rank_took_in(fleet: InProcessFleet) -> None:
    operation = await update(fleet, verify=common.VERIFICATION_LEVEL_RECEIVED)
    assert operation.state == OPERATION_STATE_OK
    assert {result.verified for result in operation.stage_results} == {common.VERIFICATION_LEVEL_RECEIVED}
    assert {result.evidence for result in operation.stage_results} == {common.EVIDENCE_RANK}
    spoil(fleet, "commit_update", 1)
    wrong = result_of(await update(fleet, verify=common.VERIFICATION_LEVEL_RECEIVED), "b")
    assert (wrong.error.reason, wrong.error.metadata["ranks"]) == ("DIGEST_MISMATCH", "1")
    assert wrong.state == common.STAGE_STATE_DIRTY


async def test_level_received_of_a_partial_update_goes_by_what_was_sent(fleet: InProcessFleet) -> None:
    options = v.UpdateOptions(verify=common.VERIFICATION_LEVEL_RECEIVED)
    plan = await begin(fleet, kind=v.UPDATE_KIND_PARTIAL, options=options)
    await join(fleet, plan)
    await write(fleet, plan, "w2")
    error = await refusal(commit(fleet, plan))
    assert (error.reason, error.field) == (Reason.FIELD_REQUIRED, "expected_digest")
    assert (await commit(fleet, plan, sent_digest=digest("w2"))).state == OPERATION_STATE_OK


async def test_a_part_for_one_target_alone_is_verified_by_what_it_took_in(make_fleet: Callable) -> None:
    """There is no replica, and of the whole of the weights the sources know nothing."""

    async def part(sent: str) -> Operation:
        plan = await begin(fleet, kind=v.UPDATE_KIND_PARTIAL)
        await join(fleet, plan)
        await write(fleet, plan, "w2")
        return await commit(fleet, plan, sent_digest=digest(sent))

    async with make_fleet(b=2) as fleet:
        operation = await part("w2")
        assert operation.state == OPERATION_STATE_OK
        assert [result.verified for result in operation.stage_results] == [common.VERIFICATION_LEVEL_RECEIVED]
        assert (await part("another")).state == OPERATION_STATE_FAILED


async def test_who_was_not_told_to_digest_what_comes_is_not_verified_by_that(make_fleet: Callable) -> None:
    """It was to be verified by a digest of the whole, which then nobody gave."""
    async with make_fleet(b=2) as fleet:
        plan = await begin(fleet)
        await join(fleet, plan)
        await write(fleet, plan, "w2")
        operation = await commit(fleet, plan, sent_digest=digest("w2"))
        assert operation.state == OPERATION_STATE_OK
        assert [result.verified for result in operation.stage_results] == [common.VERIFICATION_LEVEL_NONE]


async def test_level_probe_compares_log_probabilities(fleet: InProcessFleet) -> None:
    level = common.VERIFICATION_LEVEL_PROBE
    operation = await update(fleet, verify=level, probe=probe_of("w1"))
    assert operation.state == OPERATION_STATE_OK
    assert {result.verified for result in operation.stage_results} == {level}
    operation = await update(fleet, verify=level, probe=probe_of("other weights"))
    assert operation.state == OPERATION_STATE_FAILED
    for result in operation.stage_results:
        assert result.error.reason == "PROBE_MISMATCH"
        assert "of prompt 0 has log probability" in result.error.message
        assert result.state == common.STAGE_STATE_DIRTY
    assert version_of(fleet) == ("step-1", 2)


@pytest.mark.parametrize(
    ("verify", "held"),
    [
        (common.VERIFICATION_LEVEL_UNSPECIFIED, common.VERIFICATION_LEVEL_EXPECTED),
        (common.VERIFICATION_LEVEL_EXPECTED, common.VERIFICATION_LEVEL_EXPECTED),
        (common.VERIFICATION_LEVEL_REPLICA, common.VERIFICATION_LEVEL_REPLICA),
        (common.VERIFICATION_LEVEL_RECEIVED, common.VERIFICATION_LEVEL_RECEIVED),
        (common.VERIFICATION_LEVEL_PROBE, common.VERIFICATION_LEVEL_NONE),
        (common.VERIFICATION_LEVEL_NONE, common.VERIFICATION_LEVEL_NONE),
    ],
)
async def test_a_probe_that_is_passed_is_computed_at_every_level(fleet: InProcessFleet, verify: int, held: int) -> None:
    both = common.Verification(held=held, computed=common.VERIFICATION_LEVEL_PROBE)  # type: ignore[arg-type]
    operation = await update(fleet, verify=verify, probe=probe_of("w1"))
    assert operation.state == OPERATION_STATE_OK
    assert [result.verification for result in operation.stage_results] == [both, both]
    assert {result.verified for result in operation.stage_results} == {max(held, common.VERIFICATION_LEVEL_PROBE)}
    assert operation.verification == both, "the operation says which evidence there is of each kind"
    (model,) = (await fleet.stub.GetFleet(GetFleetRequest())).models
    assert model.verification == both, "and so does the version"
    operation = await update(fleet, verify=verify, probe=probe_of("other weights"))
    assert operation.state == OPERATION_STATE_FAILED
    assert {result.error.reason for result in operation.stage_results} == {"PROBE_MISMATCH"}
    assert not any(result.HasField("verification") for result in operation.stage_results)
    assert version_of(fleet) == ("step-1", 2)


async def test_without_a_probe_nothing_is_said_to_be_computed(fleet: InProcessFleet) -> None:
    operation = await update(fleet)
    held = common.Verification(held=common.VERIFICATION_LEVEL_EXPECTED, computed=common.VERIFICATION_LEVEL_NONE)
    assert operation.verification == held
    (model,) = (await fleet.stub.GetFleet(GetFleetRequest())).models
    assert model.verification == held


async def test_the_evidence_for_a_version_outlives_its_coordinator(fleet: InProcessFleet) -> None:
    both = (await update(fleet, probe=probe_of("w1"))).verification
    await restart_coordinator(fleet)
    (model,) = (await fleet.stub.GetFleet(GetFleetRequest())).models
    assert both.computed == common.VERIFICATION_LEVEL_PROBE
    assert model.verification == both


async def test_a_version_has_the_weakest_evidence_of_its_targets(fleet: InProcessFleet) -> None:
    able = fleet.server.coordinator.roster.slots["a"].record.registration.capabilities
    able.verification[:] = [common.VERIFICATION_LEVEL_RECEIVED]
    operation = await update(fleet, sent_digest=digest("w1"))
    levels = {result.slot: result.verification.held for result in operation.stage_results}
    assert levels == {"a": common.VERIFICATION_LEVEL_RECEIVED, "b": common.VERIFICATION_LEVEL_EXPECTED}
    assert operation.verification.held == common.VERIFICATION_LEVEL_RECEIVED


async def test_a_later_batch_with_less_evidence_weakens_that_of_the_version(fleet: InProcessFleet) -> None:
    able = fleet.server.coordinator.roster.slots["b"].record.registration.capabilities
    able.verification[:] = [common.VERIFICATION_LEVEL_RECEIVED]
    options = v.UpdateOptions(pause=common.PAUSE_MODE_RETRACT)
    plan = await begin(fleet, options=options, apply=v.APPLY_MODE_STAGED, rollout=u.RolloutStrategy(max_unavailable=1))
    await join(fleet, plan)
    await write(fleet, plan, "w1")
    operation = await commit(fleet, plan, digest("w1"), sent_digest=digest("w1"))
    assert operation.state == OPERATION_STATE_OK
    assert [r.verification.held for r in operation.stage_results] == [
        common.VERIFICATION_LEVEL_EXPECTED,
        common.VERIFICATION_LEVEL_RECEIVED,
    ]
    (model,) = (await fleet.stub.GetFleet(GetFleetRequest())).models
    assert model.verification == operation.verification
    assert model.verification.held == common.VERIFICATION_LEVEL_RECEIVED


async def test_a_probe_that_a_target_cannot_compute_is_refused_at_the_begin(make_fleet: Callable) -> None:
    async with make_fleet(a=1) as fleet:
        await fleet.stub.ReleaseMemory(v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_KV_CACHE]))
        error = await refusal(begin(fleet, options=v.UpdateOptions(probe=probe_of("w1"))))
        assert (error.reason, error.field) == (Reason.VERIFICATION_UNREACHABLE, "options.probe")
        assert error.message == "a cannot compute the probe: its KV cache is released, so it can compute nothing"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (v.UpdateOptions(probe=probe_of("w1")), "probe"),
        (v.UpdateOptions(verify=common.VERIFICATION_LEVEL_RECEIVED), "verify"),
    ],
)
async def test_evidence_that_is_not_computed_of_an_adapter_is_refused(
    fleet: InProcessFleet, options: v.UpdateOptions, field: str
) -> None:
    config = v.AdapterConfig(lora_rank=2, target_modules=["q_proj"])
    kind = {"kind": v.UPDATE_KIND_ADAPTER, "adapter": "math", "adapter_config": config}
    error = await refusal(begin(fleet, options=options, **kind))
    assert (error.reason, error.field) == (Reason.FIELD_CONFLICT, f"options.{field}")


async def test_an_engine_that_answers_for_its_ranks_is_never_taken_at_its_word(make_fleet: Callable) -> None:
    async with make_fleet(a=1, options={"opaque": "said"}) as fleet:
        for level in (0, common.VERIFICATION_LEVEL_NONE):
            error = await refusal(begin(fleet, options=v.UpdateOptions(verify=level)))
            assert (error.reason, error.field) == (Reason.VERIFICATION_UNREACHABLE, "options.verify")
            assert "one answer for all ranks" in error.message
            assert "Pass a probe" in error.next_step
        operation = await update(fleet, probe=probe_of("w1"))
        assert operation.state == OPERATION_STATE_OK
        (result,) = operation.stage_results
        assert (result.verified, result.evidence) == (common.VERIFICATION_LEVEL_PROBE, common.EVIDENCE_ENGINE)
        assert result.verification.held == common.VERIFICATION_LEVEL_NONE
        assert (await update(fleet, probe=probe_of("w2"))).state == OPERATION_STATE_FAILED


async def test_an_answer_for_all_ranks_is_not_enough_without_verification(make_fleet: Callable) -> None:
    async with make_fleet(a=1, options={"opaque": "unsaid"}) as fleet:
        (wrong,) = (await update(fleet, expected="")).stage_results
        assert (wrong.error.reason, wrong.state) == ("VERIFICATION_UNREACHABLE", common.STAGE_STATE_DIRTY)
        assert version_of(fleet) == ("initial", 1)
        assert (await update(fleet, probe=probe_of("w1"))).state == OPERATION_STATE_OK


async def test_a_delta_is_for_targets_that_are_at_its_base(fleet: InProcessFleet) -> None:
    base = common.WeightVersion(label="initial", sequence=1)
    plan = await begin(fleet, kind=v.UPDATE_KIND_DELTA, base=base)
    # Nothing differs: nothing is sent, and yet every target proves what it holds.
    operation = await commit(fleet, plan, digest(weights(fleet)[0]))
    assert operation.state == OPERATION_STATE_OK
    assert {result.verified for result in operation.stage_results} == {common.VERIFICATION_LEVEL_EXPECTED}
    error = await refusal(begin(fleet, "step-2", kind=v.UPDATE_KIND_DELTA, base=base))
    assert (error.reason, error.field) == (Reason.BASE_MISMATCH, "base")
    assert "'step-1'" in error.message


async def test_a_delta_never_clears_what_is_dirty(make_fleet: Callable) -> None:
    async with make_fleet(a=1, b=2, heal=False) as fleet:
        plan = await begin(fleet)
        await join(fleet, plan)
        await write(fleet, plan, "w1")
        await abort(fleet, plan)
        base = common.WeightVersion(label="initial")
        error = await refusal(begin(fleet, kind=v.UPDATE_KIND_DELTA, base=base))
        assert error.reason is Reason.WEIGHTS_DIRTY
        with_quorum = await refusal(
            begin(fleet, kind=v.UPDATE_KIND_DELTA, base=base, options=v.UpdateOptions(quorum=1))
        )
        assert with_quorum.reason is Reason.FIELD_INVALID, "nobody is left"


async def test_a_checkpoint_that_says_which_digest_it_has_is_held_to_it(
    make_fleet: Callable, checkpoint: Callable[[str], str]
) -> None:
    async with make_fleet(a=1) as fleet:
        request = v.UpdateWeightsFromDiskRequest(model_path=checkpoint("two"), weight_version="two")
        assert (await fleet.stub.UpdateWeightsFromDisk(request)).stage_results[0].verified == (
            common.VERIFICATION_LEVEL_NONE
        )
        said = Path(checkpoint("two")) / "digest.txt"
        said.write_text(digest("two"))
        operation = await fleet.stub.UpdateWeightsFromDisk(request)
        assert operation.stage_results[0].verified == common.VERIFICATION_LEVEL_EXPECTED
        said.write_text(digest("another"))
        operation = await fleet.stub.UpdateWeightsFromDisk(request)
        assert (operation.state, operation.stage_results[0].error.reason) == (OPERATION_STATE_FAILED, "DIGEST_MISMATCH")


@pytest.mark.parametrize(
    ("probe", "field"),
    [
        (v.Probe(tolerance=1), "options.probe.prompts"),
        (v.Probe(prompts=[v.ProbePrompt(token_ids=[1, 2], logprobs=[-1])]), "options.probe.tolerance"),
        (v.Probe(prompts=[v.ProbePrompt(token_ids=[1])], tolerance=1), "options.probe.prompts[0].token_ids"),
        (v.Probe(prompts=[v.ProbePrompt(token_ids=[1, 2])], tolerance=1), "options.probe.prompts[0].logprobs"),
        (
            v.Probe(prompts=[v.ProbePrompt(token_ids=[1, 2], logprobs=[float("nan")])], tolerance=1),
            "options.probe.prompts[0].logprobs",
        ),
        (
            v.Probe(prompts=[v.ProbePrompt(token_ids=[1, 2], logprobs=[-1])] * 257, tolerance=1),
            "options.probe.prompts",
        ),
    ],
)
async def test_a_probe_that_could_not_tell_is_refused(fleet: InProcessFleet, probe: v.Probe, field: str) -> None:
    error = await refusal(begin(fleet, options=v.UpdateOptions(probe=probe)))
    assert error.field == field
