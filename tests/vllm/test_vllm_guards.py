"""Everything that is known to end a real vLLM, to hang it, or to be done wrongly without a word: refused or turned into
what is harmless, and the server serves on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from models import changed
from rlctl_vllm.server import facts
from server_stage import Driver, Segments, Source, broken_checkpoint, prompt, refusal

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.engine import Call
from rlctl.ports import SystemClock
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v
from rlctl.worker.worker import Worker

pytestmark = pytest.mark.timeout(300)
_numbers = itertools.count(1)


@pytest.fixture(autouse=True)
def serving(driver: Driver) -> Iterator[None]:
    """After each test the server generates."""
    yield
    driver.tell(v.ContinueGenerationRequest())
    generating = driver.begin(prompt(encode("8"), 3))
    generating.result()
    assert len(generating.tokens) == 3
    assert not driver.failures


@pytest.mark.parametrize(
    ("request_", "reason", "field"),
    [
        (prompt([1, 16], 2), Reason.FIELD_INVALID, "input_ids.ids"),
        (prompt([1] * 512, 2), Reason.PROMPT_TOO_LONG, ""),
        (prompt([], 2), Reason.FIELD_REQUIRED, "input_ids.ids"),
        (rollout.GenerateRequest(), Reason.FIELD_REQUIRED, "text"),
        (rollout.GenerateRequest(text="1" * 600), Reason.PROMPT_TOO_LONG, ""),
        (prompt([1], 2, adapter="a"), Reason.ADAPTER_NOT_FOUND, "adapter"),
        (prompt([1], 2, top_logprobs_num=17), Reason.FIELD_INVALID, "top_logprobs_num"),
        (prompt([1], 2, logprob_start_len=3), Reason.FIELD_INVALID, "logprob_start_len"),
        (prompt([1], 2, logprob_start_len=-2), Reason.FIELD_INVALID, "logprob_start_len"),
        (
            prompt([1], 2, sampling_params=rollout.SamplingParams(stop_token_ids=[99])),
            Reason.FIELD_INVALID,
            "sampling_params.stop_token_ids",
        ),
        (
            prompt([1], 2, sampling_params=rollout.SamplingParams(temperature=float("nan"))),
            Reason.FIELD_INVALID,
            "sampling_params.temperature",
        ),
        (
            prompt([1], 2, return_logprob=True, sampling_params=rollout.SamplingParams(top_p=0.5)),
            Reason.UNSUPPORTED,
            "sampling_params.top_p",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Reason) else None,
)
def test_requests_that_vllm_refuses_or_takes_for_others(
    driver: Driver, request_: rollout.GenerateRequest, reason: Reason, field: str
) -> None:
    error = refusal(driver, request_)
    assert (error.reason, error.field) == (reason, field)


def test_fields_of_vllms_own(driver: Driver) -> None:
    fields = Struct()
    fields.update({"kv_transfer_params": {"do_remote_decode": True}})
    error = refusal(driver, prompt([1], 2, engine_fields=fields))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "engine_fields")
    allowed = Struct()
    allowed.update({"sampling_params": {"allowed_token_ids": [7]}})
    generating = driver.begin(prompt([1], 4, engine_fields=allowed))
    generating.result()
    assert generating.tokens == [7] * 4


def test_an_output_that_does_not_fit_is_cut_at_the_context(driver: Driver) -> None:
    generating = driver.begin(prompt([1] * 500, 5000))
    last = generating.result()[-1].samples[0]
    assert last.finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert len(generating.tokens) == 12


def test_a_pause_mode_that_it_does_not_have(driver: Driver) -> None:
    error = refusal(driver, v.PauseGenerationRequest(mode=99))  # type: ignore[arg-type]
    assert (error.reason, error.outcome) == (Reason.UNSUPPORTED, common.OUTCOME_SKIPPED)


@pytest.mark.parametrize("then", ["ABORT", "DRAIN"])
def test_what_is_frozen_in_place_can_be_ended_or_drained(driver: Driver, then: str) -> None:
    running = driver.begin(prompt(encode("7"), 100)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE))
    driver.tell(v.PauseGenerationRequest(mode=common.PauseMode.Value(f"PAUSE_MODE_{then}")))
    wanted = rollout.FINISH_TYPE_ABORT if then == "ABORT" else rollout.FINISH_TYPE_LENGTH
    assert running.result()[-1].samples[0].finish_reason.type == wanted


def test_a_drain_that_takes_too_long_pauses_nothing(driver: Driver) -> None:
    running = [driver.begin(prompt(encode("7"), 450)).started() for _ in range(8)]
    error = refusal(driver, v.PauseGenerationRequest(mode=common.PAUSE_MODE_DRAIN), timeout_s=0.05)
    assert error.reason is Reason.DEADLINE_EXCEEDED
    assert len(driver.begin(prompt(encode("8"), 3)).result()) >= 1, "what comes is not held back"
    for each in running:
        assert each.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_LENGTH


def test_a_drain_that_takes_too_long_freezes_again_what_was_frozen(driver: Driver) -> None:
    running = [driver.begin(prompt(encode("7"), 450)).started() for _ in range(4)]
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE))
    error = refusal(driver, v.PauseGenerationRequest(mode=common.PAUSE_MODE_DRAIN), timeout_s=0.05)
    assert error.reason is Reason.DEADLINE_EXCEEDED
    came = [len(each.tokens) for each in running]
    time.sleep(0.3)
    assert [len(each.tokens) for each in running] == came, "an update that comes now finds nothing running"
    assert driver.engine._state.stopped
    driver.tell(v.ContinueGenerationRequest())
    for each in running:
        each.result()
        assert len(each.tokens) == 450


def test_a_drain_that_takes_too_long_is_answered_in_time(driver: Driver) -> None:
    """Through a stage's worker, which says that nothing is known of what has not answered by its deadline."""
    running = [driver.begin(prompt(encode("7"), 450)).started() for _ in range(8)]

    async def carry_out() -> Any:
        loop = asyncio.get_running_loop()
        worker = Worker(driver.engine, driver.info.layout.workers[0], SystemClock())
        call = Call("drain", loop.time() + 0.5)
        return await worker.carry_out(v.PauseGenerationRequest(mode=common.PAUSE_MODE_DRAIN), call)

    (result,) = driver.admin.submit(carry_out()).result(60)
    assert (result.outcome, result.error.reason) == (common.OUTCOME_REJECTED, Reason.DEADLINE_EXCEEDED.name)
    for each in running:
        each.result()


@pytest.mark.parametrize("aborted", [False, True], ids=["inside", "after"])
def test_a_drain_lets_nothing_go_on_with_weights_that_are_half_written(
    driver: Driver, tiny: tuple[Any, Path], *, aborted: bool
) -> None:
    """vLLM's drain goes on with what an earlier pause has frozen: inside an update that ended the server."""
    first = f"drained {aborted}"
    drain = v.PauseGenerationRequest(mode=common.PAUSE_MODE_DRAIN)
    running = driver.begin(prompt(encode("7"), 400)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE))
    with Source(driver, f"drained-{next(_numbers)}") as source:
        plan = source.plan(tiny[0], large_bytes=1)
        driver.tell(v.PrepareUpdateRequest(), update_id=first)
        receiving = driver.submit(source.announce(plan[:1]), update_id=first)
        source.group.broadcast(next(source.packed(tiny[0], plan)))
        receiving.result(60)
        if aborted:
            driver.tell(v.AbortUpdateRequest(), update_id=first)
        came = len(running.tokens)
        error = refusal(driver, drain)
        assert (error.reason, error.field) == (Reason.PAUSE_MODE_CONFLICT, "mode")
        assert len(running.tokens) == came
        driver.tell(v.AbortRequestsRequest(abort_all=True))
        assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
        driver.tell(drain)  # nothing is left that it would let go on
        again = "after" if aborted else first
        driver.tell(v.PrepareUpdateRequest(), update_id=again)
        plan = source.plan(tiny[0])
        receiving = driver.submit(source.announce(plan), update_id=again)
        source.send(tiny[0], plan)
        receiving.result(60)
        driver.commit(again, f"whole-{next(_numbers)}", next(_numbers) + 100)


def test_a_request_that_is_held_back_by_a_pause_can_be_aborted(driver: Driver) -> None:
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    held = driver.begin(prompt(encode("7"), 4, rid="held"))
    while not driver.tell(v.GetLoadsRequest()).waiting:  # it has been sent, or is about to be
        assert not held.done.done()
    assert driver.tell(v.AbortRequestsRequest(rids=["held"])).aborted == 1
    assert held.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    assert not held.tokens


def test_nothing_is_generated_inside_an_update(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """vLLM's weights are on the meta device then: a step would end the server."""
    with Source(driver, f"inside-{next(_numbers)}") as source:
        plan = source.plan(tiny[0], large_bytes=1)
        driver.tell(v.PrepareUpdateRequest(), update_id="u")
        receiving = driver.submit(source.announce(plan[:1]), update_id="u")
        source.group.broadcast(next(source.packed(tiny[0], plan)))
        receiving.result(60)
        held = driver.begin(prompt(encode("7"), 4))
        error = refusal(driver, v.ContinueGenerationRequest())
        assert error.reason is Reason.ILLEGAL_STATE
        assert refusal(driver, v.CommitUpdateRequest(), update_id="u").reason is Reason.WEIGHTS_INCOMPLETE
        assert not held.tokens
        assert refusal(driver, v.CheckWeightsRequest()).reason is Reason.ILLEGAL_STATE
        driver.tell(v.AbortUpdateRequest(), update_id="u")
        assert len(held.result()) >= 1, "it had waited"


def test_packed_layers_are_not_staged(driver: Driver) -> None:
    """Requests run on, and an update in place is taken."""
    assert not driver.info.capabilities.staged_apply
    running = driver.begin(prompt(encode("7"), 100)).started()
    error = refusal(driver, v.PrepareUpdateRequest(apply=v.APPLY_MODE_STAGED), update_id="packed")
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "apply")
    assert "packed" in error.message
    assert running.result()[-1].samples[0].finish_reason.type


def test_an_update_while_requests_run(driver: Driver) -> None:
    running = driver.begin(prompt(encode("7"), 400)).started()
    assert refusal(driver, v.PrepareUpdateRequest(), update_id="u").reason is Reason.ACTIVE_REQUESTS
    driver.tell(v.PrepareUpdateRequest(abort_all_requests=True), update_id="u")
    assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    driver.tell(v.AbortUpdateRequest(), update_id="u")


def test_weights_outside_of_an_update_or_a_group(driver: Driver) -> None:
    before = driver.digest()
    bucket = v.TensorBucket(names=["model.norm.weight"], dtypes=["torch.float32"], shapes=[v.Shape(dims=[128])])
    request = v.UpdateWeightsFromDistributedRequest(group_name="none", buckets=[bucket])
    assert refusal(driver, request, update_id="u").reason is Reason.UPDATE_NOT_FOUND
    driver.prepare("u")
    assert refusal(driver, request, update_id="other").reason is Reason.UPDATE_FENCED
    error = refusal(driver, request, update_id="u")
    assert (error.reason, error.outcome) == (Reason.GROUP_NOT_FOUND, common.OUTCOME_REJECTED)
    assert refusal(driver, v.CommitUpdateRequest(), update_id="u").reason is Reason.WEIGHTS_INCOMPLETE
    assert refusal(driver, v.PrepareUpdateRequest(), update_id="u2").reason is Reason.UPDATE_IN_PROGRESS
    driver.tell(v.AbortUpdateRequest(), update_id="u")
    assert refusal(driver, v.DestroyWeightsUpdateGroupRequest(group_name="none")).reason is Reason.GROUP_NOT_FOUND
    assert driver.digest() == before, "nothing was written"


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"apply": v.APPLY_MODE_STAGED}, Reason.FIELD_CONFLICT, "abort_all_requests"),
        ({"selector": common.WEIGHT_SELECTOR_DRAFT}, Reason.UNSUPPORTED, "selector"),
    ],
    ids=["staged", "draft"],
)
def test_updates_of_kinds_that_it_does_not_take(
    driver: Driver, fields: dict[str, Any], reason: Reason, field: str
) -> None:
    """Refused before any request is ended for it."""
    running = driver.begin(prompt(encode("7"), 100)).started()
    error = refusal(driver, v.PrepareUpdateRequest(abort_all_requests=True, **fields), update_id="u")
    assert (error.reason, error.field) == (reason, field)
    assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_LENGTH


@pytest.mark.parametrize(
    ("name", "dtype", "dims"),
    [
        ("model.no_such.weight", "torch.float32", [128]),
        ("model.norm.weight", "torch.float32", [64]),
        ("model.norm.weight", "torch.int8", [128]),
        ("model.norm.weight", "torch.no_dtype", [128]),
    ],
)
def test_tensors_that_vllm_would_skip_or_fail_on(driver: Driver, name: str, dtype: str, dims: list[int]) -> None:
    before = driver.digest()
    with Source(driver, f"wrong-{next(_numbers)}") as source:
        driver.prepare("u")
        bucket = v.TensorBucket(names=[name], dtypes=[dtype], shapes=[v.Shape(dims=dims)])
        request = v.UpdateWeightsFromDistributedRequest(group_name=source.name, buckets=[bucket])
        error = refusal(driver, request, update_id="u")
        assert (error.reason, error.outcome) == (Reason.FIELD_INVALID, common.OUTCOME_REJECTED)
        assert error.field.startswith("buckets[0]")
        driver.tell(v.AbortUpdateRequest(), update_id="u")
    assert driver.digest() == before


def test_a_tensor_that_comes_twice_in_an_update(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """vLLM's loaders count elements: q twice is as many as q, k and v."""
    model = changed(tiny[0], seed=next(_numbers))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    name = "model.layers.0.self_attn.q_proj.weight"
    with Source(driver, f"twice-{next(_numbers)}") as source, Segments(driver) as trainer:
        driver.prepare("twice")
        plan = source.plan({name: weights[name]}.items())
        receiving = driver.submit(source.announce(plan), update_id="twice")
        source.send({name: weights[name]}.items(), plan)
        receiving.result(60)
        again = source.announce(plan)
        again.buckets[0].sequence = 1
        error = refusal(driver, again, update_id="twice")
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "buckets[0].names[0]")
        with pytest.raises(RlctlError) as refused:
            trainer.send(weights.items(), "twice")
        assert (refused.value.reason, refused.value.outcome) == (Reason.FIELD_INVALID, common.OUTCOME_REJECTED)
        assert name in refused.value.message
        del weights[name]
        trainer.send(weights.items(), "twice")
        driver.commit("twice", f"once-{next(_numbers)}", 100 + next(_numbers))
    assert driver.digest() == rlctl.model_digest(model)


def test_a_part_of_a_fused_layer_is_never_put_in(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """vLLM would fill the rest of it with whatever the memory held."""
    before = driver.digest()
    model = changed(tiny[0], seed=next(_numbers))
    weights = [("model.layers.0.self_attn.q_proj.weight", model.model.layers[0].self_attn.q_proj.weight.detach())]
    with Source(driver, f"fused-{next(_numbers)}") as source:
        driver.prepare("u", kind=v.UPDATE_KIND_PARTIAL)
        plan = source.plan(weights)
        receiving = driver.submit(source.announce(plan), update_id="u")
        source.send(weights, plan)
        receiving.result(60)
        error = refusal(driver, v.CommitUpdateRequest(), update_id="u")
        assert error.reason is Reason.WEIGHTS_INCOMPLETE
        assert "k_proj" in error.message
        driver.tell(v.AbortUpdateRequest(), update_id="u")
    assert driver.digest() == before


def test_a_source_that_dies_while_it_sends(driver: Driver, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=7)
    with Source(driver, f"dies-{next(_numbers)}") as source:
        plan = source.plan(model, bucket_bytes=100_000)
        driver.prepare("u")
        receiving = driver.submit(source.announce(plan), update_id="u")
        source.group.broadcast(next(source.packed(model, plan)))
        source.group.close()
        with pytest.raises(RlctlError) as failed:
            receiving.result(60)
        assert (failed.value.reason, failed.value.outcome) == (Reason.GROUP_FAILED, common.OUTCOME_DIRTY)
        error = refusal(driver, v.CommitUpdateRequest(), update_id="u")
        assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, common.OUTCOME_DIRTY)
        driver.tell(v.AbortUpdateRequest(), update_id="u")
    with Source(driver, f"lives-{next(_numbers)}") as source:
        plan = source.plan(model)
        driver.prepare("u2")
        receiving = driver.submit(source.announce(plan), update_id="u2")
        source.send(model, plan)
        receiving.result(60)
        driver.commit("u2", "two", 2)
    assert driver.digest() == rlctl.model_digest(model)
    driver.tell(v.FlushCacheRequest())


def test_a_broadcast_that_never_comes_ends_by_the_groups_timeout(driver: Driver, tiny: tuple[Any, Path]) -> None:
    before = driver.digest()
    with Source(driver, f"silent-{next(_numbers)}", timeout=Duration(seconds=2)) as source:
        driver.prepare("u")
        error = refusal(driver, source.announce(source.plan(tiny[0])), update_id="u")
        assert (error.reason, error.outcome) == (Reason.GROUP_FAILED, common.OUTCOME_REJECTED)
        driver.tell(v.AbortUpdateRequest(), update_id="u")
    assert driver.digest() == before


def test_a_group_that_cannot_be(driver: Driver) -> None:
    with Source(driver, f"stands-{next(_numbers)}") as source:
        again = v.InitWeightsUpdateGroupRequest(
            master_address="127.0.0.1",
            master_port=source.port,
            world_size=3,
            rank_offset=1,
            group_name=source.name,
            backend="gloo",
        )
        assert refusal(driver, again).reason is Reason.GROUP_EXISTS
        again.backend = "nccl"
        assert refusal(driver, again).field == "backend"
    again.backend, again.group_name, again.world_size, again.master_port = "gloo", "other", 2, 9
    again.probe_only = True
    error = refusal(driver, again, timeout_s=4)
    assert (error.reason, error.field) == (Reason.UNREACHABLE, "master_address")


@pytest.mark.parametrize("kind", ["architecture", "heads", "truncated", "missing", "smaller"])
def test_checkpoints_that_vllm_would_load_or_die_of(
    driver: Driver, tiny: tuple[Any, Path], tmp_path: Path, kind: str
) -> None:
    path = broken_checkpoint(kind, tiny, tmp_path)
    before = driver.digest()
    driver.prepare("u")
    error = refusal(driver, v.UpdateWeightsFromDiskRequest(model_path=path), update_id="u")
    assert error.reason in (Reason.CHECKPOINT_MISMATCH, Reason.CHECKPOINT_NOT_FOUND)
    assert error.outcome == common.OUTCOME_REJECTED
    assert refusal(driver, v.InspectCheckpointRequest(model_path=path)).reason is error.reason
    driver.tell(v.AbortUpdateRequest(), update_id="u")
    assert driver.digest() == before


@pytest.mark.parametrize("kind", ["old index", "shards without index", "consolidated", "pattern"])
def test_a_directory_of_which_other_files_would_be_loaded_is_a_mismatch(
    driver: Driver, tiny: tuple[Any, Path], tmp_path: Path, kind: str
) -> None:
    path = broken_checkpoint(kind, tiny, tmp_path)
    before = driver.digest()
    driver.prepare("u")
    error = refusal(driver, v.UpdateWeightsFromDiskRequest(model_path=path), update_id="u")
    assert (error.reason, error.field) == (Reason.CHECKPOINT_MISMATCH, "model_path")
    assert error.outcome == common.OUTCOME_REJECTED
    assert refusal(driver, v.InspectCheckpointRequest(model_path=path)).reason is error.reason
    driver.tell(v.AbortUpdateRequest(), update_id="u")
    assert driver.digest() == before


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_path": "/etc"}, Reason.PATH_NOT_ALLOWED),
        ({"load_format": "dummy"}, Reason.UNSUPPORTED),
        ({"target_modules": ["lm_head"]}, Reason.UNSUPPORTED),
        ({"expected_digest": "00"}, Reason.DIGEST_MISMATCH),
    ],
)
def test_loads_that_are_refused(driver: Driver, tiny: tuple[Any, Path], fields: dict[str, Any], reason: Reason) -> None:
    driver.prepare("u")
    request = v.UpdateWeightsFromDiskRequest(**{"model_path": str(tiny[1]), **fields})
    error = refusal(driver, request, update_id="u")
    assert (error.reason, error.field) == (reason, next(iter(fields)))
    driver.tell(v.AbortUpdateRequest(), update_id="u")


def test_what_the_checker_does_not_do(driver: Driver) -> None:
    assert refusal(driver, v.CheckWeightsRequest(action=v.CHECK_ACTION_COMPARE)).reason is Reason.UNSUPPORTED
    both = v.CheckWeightsRequest(per_tensor=True, skip_tensors=["model.norm.weight"])
    assert refusal(driver, both).field == "skip_tensors"
    assert refusal(driver, v.CheckWeightsRequest(expected_digest="00")).reason is Reason.DIGEST_MISMATCH
    read = v.CheckWeightsRequest(action=v.CHECK_ACTION_READ, tensor="model.nothing")
    assert (refusal(driver, read).reason, refusal(driver, read).field) == (Reason.FIELD_INVALID, "tensor")


def test_memory_is_released_only_when_idle_and_resumed_only_when_released(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleep mode, which has no CPU, keeps the books only; its checks are the same."""
    why = refusal(driver, v.ReleaseMemoryRequest())
    assert (why.reason, why.outcome) == (Reason.UNSUPPORTED, common.OUTCOME_SKIPPED)
    tags = frozenset({common.MEMORY_TAG_KV_CACHE, common.MEMORY_TAG_WEIGHTS})
    monkeypatch.setattr(facts.Facts, "memory_tags", tags)
    for verb in ("ReleaseMemory", "ResumeMemory"):
        monkeypatch.delitem(driver.engine._facts.unsupported, verb)
    running = driver.begin(prompt(encode("7"), 300)).started()
    assert refusal(driver, v.ReleaseMemoryRequest()).reason is Reason.MEMORY_NOT_RELEASABLE
    running.result()
    assert len(running.tokens) == 300, "the refusal let it go on"
    assert not driver.tell(v.ResumeMemoryRequest()).released
    assert refusal(driver, v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_WEIGHTS])).field == "tags"
    assert refusal(driver, v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_CUDA_GRAPH])).field == "tags[0]"
    assert set(driver.tell(v.ReleaseMemoryRequest()).released) == tags
    late = driver.begin(prompt(encode("8"), 4))
    assert refusal(driver, v.ContinueGenerationRequest()).reason is Reason.MEMORY_RELEASED
    assert refusal(driver, v.PrepareUpdateRequest(), update_id="u").reason is Reason.MEMORY_RELEASED
    assert not late.tokens
    assert not driver.tell(v.ResumeMemoryRequest()).released
    assert len(late.result()) >= 1
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    driver.tell(v.ReleaseMemoryRequest())
    driver.tell(v.ResumeMemoryRequest())
    held = driver.begin(prompt(encode("8"), 4))
    driver.tell(v.GetLoadsRequest())
    assert not held.tokens, "waking up does not take a pause back"
    driver.tell(v.ContinueGenerationRequest())
    held.result()
