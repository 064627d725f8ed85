"""Everything that is known to end a real SGLang, to hang it, or to be done wrongly without a word: refused or turned
into what is harmless, and the server serves on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from models import changed, greedy
from rlctl_sglang.server import facts
from server_stage import Driver, Segments, Source, broken_checkpoint, prompt, refusal

import rlctl
from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo.tiny import encode
from rlctl.v1 import common_pb2 as common
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1 import verbs_pb2 as v

pytestmark = pytest.mark.timeout(300)


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
        (prompt([1] * 506, 2), Reason.PROMPT_TOO_LONG, ""),
        (prompt([], 2), Reason.FIELD_REQUIRED, "input_ids.ids"),
        (rollout.GenerateRequest(text="1" * 600), Reason.PROMPT_TOO_LONG, ""),
        (prompt([1], 2, adapter="a"), Reason.ADAPTER_NOT_FOUND, "adapter"),
        (prompt([1], 2, top_logprobs_num=17), Reason.FIELD_INVALID, "top_logprobs_num"),
        (prompt([1], 2, logprob_start_len=3), Reason.FIELD_INVALID, "logprob_start_len"),
        (
            prompt([1], 2, sampling_params=rollout.SamplingParams(seed=3)),
            Reason.UNSUPPORTED,
            "sampling_params.seed",
        ),
        (
            prompt([1], 2, sampling_params=rollout.SamplingParams(stop_token_ids=[99])),
            Reason.FIELD_INVALID,
            "sampling_params.stop_token_ids",
        ),
        (
            prompt([1], 2, sampling_params=rollout.SamplingParams(stop_token_ids=[9], ignore_eos=True)),
            Reason.UNSUPPORTED,
            "sampling_params.stop_token_ids",
        ),
        (
            prompt([1], 2, sampling_params=rollout.SamplingParams(temperature=float("nan"))),
            Reason.FIELD_INVALID,
            "sampling_params.temperature",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Reason) else None,
)
def test_requests_that_sglang_fails_on(
    driver: Driver, request_: rollout.GenerateRequest, reason: Reason, field: str
) -> None:
    error = refusal(driver, request_)
    assert (error.reason, error.field) == (reason, field)


def test_fields_of_sglangs_own(driver: Driver) -> None:
    fields = Struct()
    fields.update({"token_ids_logprob": [1 << 40]})
    error = refusal(driver, prompt([1], 2, engine_fields=fields))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "engine_fields")
    allowed = Struct()
    allowed.update({"sampling_params": {"regex": "7{3}"}})
    params = rollout.SamplingParams(max_new_tokens=10)
    text = "".join(
        part.samples[0].text for part in driver.generate(prompt([1], 0, sampling_params=params, engine_fields=allowed))
    )
    assert text == "777"


def test_an_output_that_does_not_fit_is_cut_at_the_context(driver: Driver) -> None:
    generating = driver.begin(prompt([1] * 500, 5000))
    last = generating.result()[-1].samples[0]
    assert last.finish_reason.type == rollout.FINISH_TYPE_LENGTH
    assert 0 < len(generating.tokens) <= 12


@pytest.mark.parametrize("mode", [common.PAUSE_MODE_DRAIN, 99])
def test_pause_modes_that_it_does_not_have(driver: Driver, mode: int) -> None:
    error = refusal(driver, v.PauseGenerationRequest(mode=mode))  # type: ignore[arg-type]
    assert (error.reason, error.outcome) == (Reason.UNSUPPORTED, common.OUTCOME_SKIPPED)


def test_what_is_frozen_in_place_is_never_aborted_by_a_pause(driver: Driver) -> None:
    running = driver.begin(prompt(encode("7"), 400)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE))
    assert refusal(driver, v.PauseGenerationRequest()).reason is Reason.PAUSE_MODE_CONFLICT
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    driver.tell(v.PauseGenerationRequest())
    assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT


def test_a_pause_in_place_of_nothing_can_be_followed_by_one_that_aborts(driver: Driver) -> None:
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE))
    driver.tell(v.PauseGenerationRequest())


def test_a_request_that_is_held_back_by_a_pause_can_be_aborted(driver: Driver) -> None:
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    held = driver.begin(prompt(encode("7"), 4, rid="held"))
    while not driver.engine._requests.active:  # it has been sent, or is about to be
        assert not held.done.done()
    assert driver.tell(v.AbortRequestsRequest(rids=["held"])).aborted == 1
    assert held.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    assert not held.tokens


def test_a_request_that_was_aborted_while_it_was_held_back_does_not_run_after_the_pause(driver: Driver) -> None:
    """SGLang ignores the abort of a request that it has not let in, and every later one of the same request."""
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    held = driver.begin(prompt(encode("7"), 400, rid="held"))
    while not driver.engine._requests.active:
        assert not held.done.done()
    assert driver.tell(v.AbortRequestsRequest(rids=["held"])).aborted == 1
    driver.tell(v.ContinueGenerationRequest())
    assert held.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    assert len(held.tokens) < 400


def test_what_it_was_sent_and_holds_back_never_runs_once_it_was_left(driver: Driver) -> None:
    """A half of a pair's request would be computed with other weights than those that it was admitted at."""
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    held = driver.begin(prompt(encode("7"), 400, rid="held"))
    while not driver.engine._requests.active:
        assert not held.done.done()
    for _ in range(50):
        driver.tell(v.GetLoadsRequest())  # so that it has been sent, and taken in
    asyncio.run(driver.engine._requests.cut())
    assert held.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    driver.tell(v.ContinueGenerationRequest())
    for _ in range(20):
        loads = driver.tell(v.GetLoadsRequest())
        assert (loads.running, loads.waiting) == (0, 0)


@pytest.fixture
def scheduler(driver: Driver) -> int:
    """SGLang's scheduler process."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = os.getpgid(int(process.name)) == driver.engine._server.pid
            if ours and "scheduler" in (process / "cmdline").read_text():
                return int(process.name)
    raise AssertionError("no scheduler")


@contextlib.contextmanager
def long_step(scheduler: int) -> Iterator[None]:
    """The scheduler takes everything that comes meanwhile in at once."""
    os.kill(scheduler, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(scheduler, signal.SIGCONT)


def test_a_request_whose_grammar_is_compiled_ends_before_a_pause(
    driver: Driver, scheduler: int, tiny: tuple[Any, Path]
) -> None:
    """SGLang has it wait apart from others, where a paused one does not look: no flush, and no abort, would end."""
    fields = Struct()
    fields.update({"sampling_params": {"regex": "1{5}"}})
    with long_step(scheduler):
        compiled = driver.begin(prompt(encode("7"), 5, rid="compiled", engine_fields=fields))
        while not driver.engine._requests.active:
            assert not compiled.done.done()
        pausing = driver.submit(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
        with pytest.raises(TimeoutError):
            pausing.result(1.0)
    pausing.result(30)
    assert compiled.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    assert not compiled.tokens
    held = driver.begin(prompt(encode("7"), 5, rid="held", engine_fields=fields))  # which SGLang does not let in
    driver.tell(v.PrepareUpdateRequest(), update_id="grammar")
    driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="grammar")
    driver.commit("grammar", "grammar", 2)
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_ABORT))
    assert driver.tell(v.AbortRequestsRequest(rids=["held"])).aborted == 1
    held.result()


def test_a_pause_is_refused_while_a_grammar_is_compiled_for_long(driver: Driver, scheduler: int) -> None:
    fields = Struct()
    fields.update({"sampling_params": {"regex": "2{5}"}})
    with long_step(scheduler):
        compiled = driver.begin(prompt(encode("7"), 5, engine_fields=fields))
        while not driver.engine._requests.active:
            assert not compiled.done.done()
        pause = v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT)
        assert refusal(driver, pause, timeout_s=3).reason is Reason.ACTIVE_REQUESTS
        assert not driver.engine._state.stopped
    compiled.result()


def test_a_probe_and_a_continue_take_turns(driver: Driver, scheduler: int) -> None:
    """The probe pauses again when it has ended; nobody would know of it."""
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    prompts = [v.ProbePrompt(token_ids=encode("7=7"))]
    with long_step(scheduler):
        probing = driver.submit(v.CheckWeightsRequest(action=v.CHECK_ACTION_PROBE, prompts=prompts))
        going_on = driver.submit(v.ContinueGenerationRequest())
        with pytest.raises(TimeoutError):
            going_on.result(1.0)
    probing.result(30)
    going_on.result(30)
    running = driver.begin(prompt(encode("7"), 3))
    running.result(10)
    assert len(running.tokens) == 3


@pytest.mark.parametrize("mode", [common.PAUSE_MODE_RETRACT, common.PAUSE_MODE_IN_PLACE])
def test_a_paused_scheduler_sleeps_until_its_next_message(driver: Driver, scheduler: int, mode: Any) -> None:
    """SGLang's own loop polls without a wait during a pause, and takes a core from the update."""
    running = driver.begin(prompt(encode("7"), 400)).started()
    driver.tell(v.PauseGenerationRequest(mode=mode))
    states = []
    for _ in range(100):
        time.sleep(0.01)
        states.append(Path(f"/proc/{scheduler}/stat").read_text().rpartition(") ")[2][0])
    assert states.count("S") > len(states) / 2
    driver.tell(v.ContinueGenerationRequest())
    running.result()
    assert len(running.tokens) == 400


def test_requests_that_a_pause_sent_back_do_not_keep_a_flush_waiting(driver: Driver) -> None:
    """SGLang's own wait for idleness would count them."""
    running = driver.begin(prompt(encode("7"), 400)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_RETRACT))
    assert driver.tell(v.FlushCacheRequest(idle_timeout=duration(30)), timeout_s=10).tiers == ["radix"]
    driver.tell(v.ContinueGenerationRequest())
    running.result()
    assert len(running.tokens) == 400


def test_requests_that_come_during_an_update_wait_for_its_end(driver: Driver, tiny: tuple[Any, Path]) -> None:
    """SGLang's own load would wait for them to end, however long, and take no further call meanwhile."""
    driver.tell(v.PrepareUpdateRequest(), update_id="u")
    running = driver.begin(prompt(encode("7"), 400))
    other = refusal(driver, v.PrepareUpdateRequest(abort_all_requests=True), update_id="another")
    assert other.reason is Reason.UPDATE_IN_PROGRESS
    driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="u")
    assert not running.tokens
    version = driver.commit("u", "beside", 11)
    assert running.result()[-1].samples[0].versions[0].version == version
    assert len(running.tokens) == 400


def test_memory_is_released_only_when_idle_and_resumed_only_when_released(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the memory saver, which has no CPU, SGLang keeps the books only; its checks are the same."""
    why = refusal(driver, v.ReleaseMemoryRequest())
    assert (why.reason, why.outcome) == (Reason.UNSUPPORTED, common.OUTCOME_SKIPPED)
    tags = frozenset({common.MEMORY_TAG_KV_CACHE, common.MEMORY_TAG_WEIGHTS})
    monkeypatch.setattr(facts.Facts, "memory_tags", tags)
    for verb in ("ReleaseMemory", "ResumeMemory"):
        monkeypatch.delitem(driver.engine._facts.unsupported, verb)  # type: ignore[attr-defined]
    running = driver.begin(prompt(encode("7"), 400)).started()
    assert refusal(driver, v.ReleaseMemoryRequest()).reason is Reason.MEMORY_NOT_RELEASABLE
    running.result()
    assert len(running.tokens) == 400, "the refusal let it go on"
    assert not driver.tell(v.ResumeMemoryRequest()).released
    released = driver.tell(v.ReleaseMemoryRequest(tags=[common.MEMORY_TAG_KV_CACHE])).released
    assert list(released) == [common.MEMORY_TAG_KV_CACHE]
    assert set(driver.tell(v.ReleaseMemoryRequest()).released) == tags
    assert refusal(driver, v.ContinueGenerationRequest()).reason is Reason.MEMORY_RELEASED
    assert refusal(driver, v.PrepareUpdateRequest(), update_id="u").reason is Reason.MEMORY_RELEASED
    assert refusal(driver, v.ResumeMemoryRequest(tags=[common.MEMORY_TAG_CUDA_GRAPH])).field == "tags[0]"
    left = driver.tell(v.ResumeMemoryRequest(tags=[common.MEMORY_TAG_WEIGHTS])).released
    assert list(left) == [common.MEMORY_TAG_KV_CACHE]
    assert not driver.tell(v.ResumeMemoryRequest()).released


def test_weights_outside_of_an_update_or_a_group(driver: Driver) -> None:
    before = driver.digest()
    bucket = v.TensorBucket(names=["model.norm.weight"], dtypes=["torch.float32"], shapes=[v.Shape(dims=[128])])
    request = v.UpdateWeightsFromDistributedRequest(group_name="none", buckets=[bucket])
    assert refusal(driver, request, update_id="u").reason is Reason.UPDATE_NOT_FOUND
    driver.prepare("u")
    assert refusal(driver, request, update_id="other").reason is Reason.UPDATE_FENCED
    assert refusal(driver, request, update_id="u").reason is Reason.GROUP_NOT_FOUND
    assert refusal(driver, v.CommitUpdateRequest(), update_id="u").reason is Reason.WEIGHTS_INCOMPLETE
    driver.tell(v.AbortUpdateRequest(), update_id="u")
    assert refusal(driver, v.DestroyWeightsUpdateGroupRequest(group_name="none")).reason is Reason.GROUP_NOT_FOUND
    assert driver.digest() == before, "nothing was written"


@pytest.mark.parametrize(
    ("name", "dtype", "dims", "reason"),
    [
        ("model.no_such.weight", "torch.float32", [128], Reason.FIELD_INVALID),
        ("model.norm.weight", "torch.float32", [64], Reason.FIELD_INVALID),
        ("model.norm.weight", "torch.int8", [128], Reason.FIELD_INVALID),
        ("model.norm.weight", "torch.no_dtype", [128], Reason.FIELD_INVALID),
    ],
)
def test_tensors_that_sglang_would_skip_or_fail_on(
    driver: Driver, name: str, dtype: str, dims: list[int], reason: Reason
) -> None:
    with Source(driver, f"wrong-{name}-{dtype}-{dims[0]}") as source:
        driver.prepare("u")
        bucket = v.TensorBucket(names=[name], dtypes=[dtype], shapes=[v.Shape(dims=dims)])
        request = v.UpdateWeightsFromDistributedRequest(group_name=source.name, buckets=[bucket])
        error = refusal(driver, request, update_id="u")
        assert error.reason is reason
        assert error.outcome == common.OUTCOME_REJECTED
        assert error.field.startswith("buckets[0]")
        driver.tell(v.AbortUpdateRequest(), update_id="u")


def spoilt(request: v.UpdateWeightsFromTensorRequest, how: str) -> None:
    """Make a request one that must be refused."""
    tensor = request.segments[0].tensors[0]
    match how:
        case "name":
            tensor.name = "model.layers.7.x"
        case "shape":
            tensor.shape.dims[0] -= 1
        case "dtype":
            tensor.dtype = "torch.int32"
        case "format" | "direct":
            request.load_format = "direct" if how == "direct" else "os.system"
        case "payload":
            request.engine_payloads.append(b"cos\nsystem")
        case "elsewhere":
            request.segments[0].node = "another/host"
        case "reused":
            request.segments[0].generation += 1
        case "gone":
            name = request.segments[0].shared_memory
            request.segments[0].shared_memory = name[:-1] + ("0" if name[-1] == "1" else "1")
        case "draft":
            request.options.selector = common.WEIGHT_SELECTOR_DRAFT


@pytest.mark.parametrize(
    ("how", "reason", "field"),
    [
        ("name", Reason.FIELD_INVALID, "segments[0].tensors[0].name"),
        ("shape", Reason.FIELD_INVALID, "segments[0].tensors[0].shape"),
        ("dtype", Reason.FIELD_INVALID, "segments[0].tensors[0].dtype"),
        ("format", Reason.UNSUPPORTED, "load_format"),
        ("direct", Reason.UNSUPPORTED, "load_format"),
        ("payload", Reason.UNSUPPORTED, "engine_payloads"),
        ("elsewhere", Reason.NOT_COLOCATED, "segments"),
        ("reused", Reason.SEGMENT_EXPIRED, "segments[0]"),
        ("gone", Reason.SEGMENT_NOT_FOUND, "segments[0].shared_memory"),
        ("draft", Reason.UNSUPPORTED, "options.selector"),
    ],
    ids=lambda value: value if isinstance(value, str) and "[" not in value else None,
)
def test_memory_that_sglang_would_end_on_or_that_is_not_what_was_announced(
    driver: Driver, tiny: tuple[Any, Path], how: str, reason: Reason, field: str
) -> None:
    """Refused before SGLang hears of it: nothing was written, and the update can still be ended."""
    before = driver.digest()
    driver.prepare("spoilt")
    with Segments(driver) as segments:
        for sent in segments.written(tiny[0]):
            request = v.UpdateWeightsFromTensorRequest(segments=sent.messages)
            spoilt(request, how)
            error = refusal(driver, request, update_id="spoilt")
            assert (error.reason, error.field, error.outcome) == (reason, field, common.OUTCOME_REJECTED)
            break
    driver.tell(v.AbortUpdateRequest(), update_id="spoilt")
    assert driver.digest() == before


def test_a_group_that_cannot_be(driver: Driver) -> None:
    with Source(driver, "stands") as source:
        again = v.InitWeightsUpdateGroupRequest(
            master_address="127.0.0.1",
            master_port=source.port,
            world_size=3,
            rank_offset=1,
            group_name="stands",
            backend="gloo",
        )
        assert refusal(driver, again).reason is Reason.GROUP_EXISTS
        again.world_size, again.master_port = 2, source.port + 1
        assert refusal(driver, again).reason is Reason.GROUP_EXISTS, "the trainer would wait in another store"
        again.group_name = "other"
        again.world_size = 1
        assert refusal(driver, again).field == "rank_offset"
    again.world_size = 2
    again.master_port = 9
    error = refusal(driver, again)
    assert (error.reason, error.field) == (Reason.UNREACHABLE, "master_address")


def test_a_source_that_dies_while_it_sends(driver: Driver, tiny: tuple[Any, Path]) -> None:
    model = changed(tiny[0], seed=7)
    with Source(driver, "dies") as source:
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
    with Source(driver, "lives") as source:
        plan = source.plan(model)
        driver.prepare("u2")
        receiving = driver.submit(source.announce(plan), update_id="u2")
        source.send(model, plan)
        receiving.result(60)
        driver.commit("u2", "two", 2)
    assert driver.digest() == rlctl.model_digest(model)
    driver.tell(v.FlushCacheRequest())
    driver.tell(v.ContinueGenerationRequest())
    generating = driver.begin(prompt(encode("2"), 6))
    generating.result()
    assert generating.tokens == greedy(model, encode("2"), 6)


def test_an_update_under_requests_that_are_frozen_in_place(driver: Driver, tiny: tuple[Any, Path]) -> None:
    running = driver.begin(prompt(encode("7"), 400)).started()
    driver.tell(v.PauseGenerationRequest(mode=common.PAUSE_MODE_IN_PLACE))
    driver.tell(v.PrepareUpdateRequest(), update_id="frozen")
    driver.tell(v.UpdateWeightsFromDiskRequest(model_path=str(tiny[1])), update_id="frozen")
    version = driver.commit("frozen", "frozen", 3)
    assert driver.digest() == rlctl.model_digest(tiny[0])
    assert driver.tell(v.GetModelInfoRequest()).weight_version == version
    driver.tell(v.ContinueGenerationRequest())
    spans = running.result()[-1].samples[0].versions
    assert spans[-1].version == version
    assert spans[-1].HasField("kv_version"), "nothing was flushed: entries of the weights before were used"
    assert spans[-1].kv_version == spans[0].version
    assert len(running.tokens) == 400
    driver.tell(v.FlushCacheRequest())
    (span,) = driver.generate(prompt(encode("7"), 4))[-1].samples[0].versions
    assert not span.HasField("kv_version")


def test_weights_are_not_scrambled_under_requests_nor_in_an_update(driver: Driver) -> None:
    """What a prefill server computes of them would be decoded elsewhere."""
    scramble = v.CheckWeightsRequest(action=v.CHECK_ACTION_RESET_TENSORS)
    before = driver.digest()
    running = driver.begin(prompt(encode("7"), 400)).started()
    assert refusal(driver, scramble).reason is Reason.ACTIVE_REQUESTS
    driver.tell(v.PrepareUpdateRequest(abort_all_requests=True), update_id="u")
    running.result()
    assert refusal(driver, scramble).reason is Reason.ILLEGAL_STATE
    driver.tell(v.AbortUpdateRequest(), update_id="u")
    assert driver.digest() == before


def test_an_update_while_requests_run(driver: Driver) -> None:
    running = driver.begin(prompt(encode("7"), 400)).started()
    assert refusal(driver, v.PrepareUpdateRequest(), update_id="u").reason is Reason.ACTIVE_REQUESTS
    driver.tell(v.PrepareUpdateRequest(abort_all_requests=True), update_id="u")
    assert running.result()[-1].samples[0].finish_reason.type == rollout.FINISH_TYPE_ABORT
    driver.tell(v.AbortUpdateRequest(), update_id="u")


@pytest.mark.parametrize("kind", ["architecture", "heads", "truncated", "missing", "smaller"])
def test_checkpoints_that_sglang_would_load_or_fail_on(
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
    assert refusal(driver, v.CheckWeightsRequest(per_tensor=True, skip_tensors=["norm"])).field == "skip_tensors"
    assert refusal(driver, v.CheckWeightsRequest(expected_digest="00")).reason is Reason.DIGEST_MISMATCH
