"""The checker says what the ranks hold: digests as SGLang-Omni computes them, and as the checkpoint has them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from rlctl_torch.verbs import check_weights
from torch_source import digest_of, load, prepare, tensors_of
from torch_stage import Stage, merge, until
from transformers import AutoModelForCausalLM

from rlctl.contract.decode_check import FLOORS, OUTPUTS
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.fingerprints import fingerprints
from rlctl.demo import tiny
from rlctl.trainer.probe import Probe
from rlctl.v1.common_pb2 import MEMORY_TAG_WEIGHTS, OUTCOME_REJECTED, PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT
from rlctl.v1.verbs_pb2 import (
    APPLY_MODE_STAGED,
    CHECK_ACTION_COMPARE,
    CHECK_ACTION_DECODE,
    CHECK_ACTION_PROBE,
    CHECK_ACTION_READ,
    CHECK_ACTION_RESET_TENSORS,
    CHECK_ACTION_SNAPSHOT,
    AbortUpdateRequest,
    CheckReport,
    CheckWeightsRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    PauseGenerationRequest,
    ProbePrompt,
    ReleaseMemoryRequest,
    ResumeMemoryRequest,
    SealUpdateRequest,
    UpdateWeightsFromDiskRequest,
)
from rlctl.weights.shards import first_rows
from rlctl.weights.shards.mismatch import digest_parts
from rlctl.weights.tensor import digest
from rlctl.weights.tensor.digest import combine, tensor_digest


@pytest.fixture(autouse=True)
async def as_before(stage: Stage) -> AsyncIterator[None]:
    yield
    await load(stage, stage.config.model_path, abort_all_requests=True)


async def check(stage: Stage, action: int = 0, **fields: object) -> list[CheckReport]:
    return await stage(CheckWeightsRequest(action=action, **fields))


async def test_digests_of_every_rank_and_of_the_model(stage: Stage) -> None:
    path = stage.config.model_path
    tensors = tensors_of(path)
    reports = await check(stage, per_tensor=True)
    module = stage.engine._rank.model.module
    local = {n: tensor_digest(n, t) for n, t in [*module.named_parameters(), *module.named_buffers()]}
    assert {t.name: t.sha256 for t in reports[0].tensors} == local
    assert (reports[0].rank_digest, reports[0].tensor_count) == (combine(local), len(local))
    assert {report.model_digest for report in reports} == {digest_of(path)}
    hashed = {t.name: t for report in reports for t in report.model_tensors}
    assert sum(len(report.model_tensors) for report in reports) == len(tensors), "each is in one share"
    for name, tensor in tensors.items():
        entry = hashed[name]
        assert entry.sha256 == tensor_digest(name, tensor)
        assert (entry.dtype, tuple(entry.shape.dims)) == (str(tensor.dtype), tuple(tensor.shape))
    assert all(report.elapsed.ToNanoseconds() > 0 and not report.inconsistent for report in reports)
    if len(reports) == 2:
        assert reports[0].rank_digest != reports[1].rank_digest


async def test_digests_are_equal_whatever_the_layout(stage: Stage) -> None:
    (report, *_) = await check(stage)
    assert report.model_digest == digest_of(stage.config.model_path)
    assert not report.tensors
    (report, *_) = await check(stage, model_digest=False)
    assert report.model_digest == ""
    (report, *_) = await check(stage, skip_tensors=["mlp", "inv_freq"], per_tensor=True)
    assert not [t.name for t in [*report.tensors, *report.model_tensors] if "mlp" in t.name or "inv_freq" in t.name]


async def test_compare_names_what_has_changed_since_the_snapshot(stage: Stage, checkpoints) -> None:
    await check(stage, CHECK_ACTION_SNAPSHOT)
    for report in await check(stage, CHECK_ACTION_COMPARE):
        assert (report.matched, list(report.changed)) == (report.tensor_count, [])
    await load(stage, checkpoints(seed=1))
    for report in await check(stage, CHECK_ACTION_COMPARE, skip_tensors=["norm"]):
        unchanged = ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
        assert report.matched == len(unchanged)
        assert len(report.changed) == report.tensor_count - len(unchanged)
        assert not report.missing
        assert not report.unexpected
        assert "lm_head.weight" in report.changed


async def test_reset_scrambles_every_tensor_and_only_a_full_update_helps(stage: Stage) -> None:
    await check(stage, CHECK_ACTION_SNAPSHOT)
    for report in await check(stage, CHECK_ACTION_RESET_TENSORS):
        assert report.model_digest != digest_of(stage.config.model_path)
    for report in await check(stage, CHECK_ACTION_COMPARE, skip_tensors=["rotary"]):
        assert report.matched == 0
    for report in await check(stage, CHECK_ACTION_RESET_TENSORS):  # does not undo the first time
        assert not report.inconsistent
    for report in await check(stage, CHECK_ACTION_COMPARE, skip_tensors=["rotary"]):
        assert report.matched == 0
    with pytest.raises(RlctlError) as caught:
        await stage(ContinueGenerationRequest())
    assert caught.value.reason is Reason.WEIGHTS_DIRTY
    await load(stage, stage.config.model_path)
    for report in await check(stage, CHECK_ACTION_COMPARE):
        assert report.matched == report.tensor_count
    assert len(await stage.tokens([1, 2, 3], 3)) == 3


async def test_reset_leaves_out_what_it_is_told_to(stage: Stage) -> None:
    await check(stage, CHECK_ACTION_SNAPSHOT)
    await check(stage, CHECK_ACTION_RESET_TENSORS, skip_tensors=["norm"])
    for report in await check(stage, CHECK_ACTION_COMPARE, skip_tensors=["rotary"]):
        assert report.matched > 0
        assert report.changed
        assert not any("norm" in name for name in report.changed)
        assert report.matched + len(report.changed) == report.tensor_count


async def test_reset_is_refused_under_requests_and_inside_an_update(stage: Stage) -> None:
    async for _ in stage.stream([1, 2, 3], max_new_tokens=250, ignore_eos=True):
        with pytest.raises(RlctlError) as caught:
            await check(stage, CHECK_ACTION_RESET_TENSORS)
        assert caught.value.reason is Reason.ACTIVE_REQUESTS
        break
    update = await prepare(stage, abort_all_requests=True)
    with pytest.raises(RlctlError) as caught:
        await check(stage, CHECK_ACTION_RESET_TENSORS)
    assert caught.value.reason is Reason.UPDATE_IN_PROGRESS
    await stage(AbortUpdateRequest(), update=update)


async def test_an_expected_digest_is_compared(stage: Stage) -> None:
    expected = digest_of(stage.config.model_path)
    await check(stage, expected_digest=expected)
    await check(stage, CHECK_ACTION_COMPARE, expected_digest=expected)
    with pytest.raises(RlctlError) as caught:
        await check(stage, expected_digest="0" * 64)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert caught.value.metadata == {"expected": "0" * 64, "found": expected}


async def test_there_must_be_something_to_compare_with(checkpoints) -> None:
    fresh = Stage(checkpoints())
    await fresh.start()
    try:
        with pytest.raises(RlctlError) as caught:
            await check(fresh, CHECK_ACTION_COMPARE)
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, "action")
    finally:
        await fresh.stop()


async def test_replicas_that_differ_are_named(checkpoints, follower) -> None:
    stage = Stage(checkpoints(), follower)
    await stage.start()
    try:
        norm = stage.engine._rank.model.module.model.norm.weight
        norm.data[0] += 1
        for report in await check(stage):
            assert list(report.inconsistent) == ["model.norm.weight"]
            assert report.model_digest != digest_of(stage.config.model_path)
    finally:
        await stage.stop()


class Hold:
    """Holds back the hashing of rank 0 until the test lets it go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def release(self) -> None:
        self._open.set()

    def again(self) -> None:
        self._open.clear()
        self.reached.clear()

    def digest(self, *args: Any, **kwargs: Any) -> str:
        self.reached.set()
        assert self._open.wait(30), "the test holds the hashing back for ever"
        return tensor_digest(*args, **kwargs)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    hold = Hold()
    monkeypatch.setattr(digest, "tensor_digest", hold.digest)
    yield hold
    hold.release()


async def begun(stage: Stage, hold: Hold, **fields: object) -> asyncio.Task[list[Any]]:
    """A checksum that has begun to hash, and is held back in it."""
    checking = asyncio.create_task(stage.ranks(CheckWeightsRequest(), **fields))
    await until(hold.reached.is_set)
    return checking


def reasons(answers: list[Any]) -> set[tuple[Reason, int]]:
    assert all(isinstance(answer, RlctlError) for answer in answers), answers
    return {(answer.reason, answer.outcome) for answer in answers}


async def test_weights_are_digested_beside_generation(stage: Stage, hold: Hold) -> None:
    checking = await begun(stage, hold)
    another = asyncio.create_task(check(stage, model_digest=False))
    assert len(await stage.tokens([1, 2, 3], 5)) == 5
    assert not checking.done()
    assert not another.done(), "one after the other, in the same order at every rank"
    hold.release()
    answers = await checking
    assert {report.model_digest for _, report in answers} == {digest_of(stage.config.model_path)}
    await another
    assert (await check(stage))[0].model_digest == digest_of(stage.config.model_path)


async def test_an_update_that_begins_meanwhile_goes_first(stage: Stage, hold: Hold, checkpoints) -> None:
    checking = await begun(stage, hold)
    await load(stage, checkpoints(seed=1), abort_all_requests=True)
    assert not checking.done()
    hold.release()
    assert reasons(await checking) == {(Reason.UPDATE_IN_PROGRESS, OUTCOME_REJECTED)}
    assert (await check(stage))[0].model_digest == digest_of(checkpoints(seed=1))


async def test_a_staged_update_goes_first_too_and_the_swap_stops_who_reads_what_it_replaces(
    stage: Stage, hold: Hold, checkpoints
) -> None:
    """Its copy is filled where weights are digested, and in turn."""
    rank = stage.engine._rank
    checking = await begun(stage, hold)
    preparing = asyncio.create_task(prepare(stage, apply=APPLY_MODE_STAGED))
    await until(lambda: any(stop.cause for stop, _ in rank.beside._readers))
    assert not preparing.done()
    hold.release()
    assert reasons(await checking) == {(Reason.UPDATE_IN_PROGRESS, OUTCOME_REJECTED)}
    update = await preparing
    await stage(UpdateWeightsFromDiskRequest(model_path=checkpoints(seed=1)), update=update)
    await stage(SealUpdateRequest(), update=update)
    hold.again()
    checking = await begun(stage, hold)
    assert len(await stage.tokens([1, 2, 3], 5)) == 5, "an update that is staged keeps no steps at rest"
    await stage(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    await stage(CommitUpdateRequest(), update=update)
    await stage(ContinueGenerationRequest())
    assert not checking.done()
    hold.release()
    assert reasons(await checking) == {(Reason.UPDATE_IN_PROGRESS, OUTCOME_REJECTED)}
    assert (await check(stage))[0].model_digest == digest_of(checkpoints(seed=1))


async def test_weights_are_not_freed_under_whoever_digests_them(stage: Stage, hold: Hold) -> None:
    checking = await begun(stage, hold)
    releasing = asyncio.create_task(stage(ReleaseMemoryRequest(tags=[MEMORY_TAG_WEIGHTS])))
    done, _ = await asyncio.wait({releasing}, timeout=0.2)
    assert not done
    hold.release()
    assert reasons(await checking) == {(Reason.MEMORY_RELEASED, OUTCOME_REJECTED)}
    await releasing
    await stage(ResumeMemoryRequest())


async def test_a_checksum_ends_by_its_deadline(stage: Stage, hold: Hold) -> None:
    checking = await begun(stage, hold, within=2.5)
    await asyncio.sleep(2.3)  # the deadline itself is what is waited for
    hold.release()
    assert reasons(await checking) == {(Reason.DEADLINE_EXCEEDED, OUTCOME_REJECTED)}
    await check(stage)


async def test_stopping_an_engine_ends_what_digests_beside_it(
    checkpoints, follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, hold = Stage(checkpoints(), follower), Hold()
    await stage.start()
    monkeypatch.setattr(digest, "tensor_digest", hold.digest)
    checking = await begun(stage, hold)
    await stage.stop()
    hold.release()
    assert {answer.reason for answer in await checking} <= {Reason.CANCELLED, Reason.RANK_LOST}


async def test_rows_of_a_tensor_are_read_beside_generation(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(stage.config.model_path)
    stream = stage.stream([1, 2, 3], max_new_tokens=40, ignore_eos=True, temperature=0)
    parts = [await anext(stream)]
    for name, tensor in tensors.items():
        reports = await check(stage, CHECK_ACTION_READ, tensor=name, rows=5)
        told = [report.values for report in reports if report.HasField("values")]
        found = [torch.tensor(list(each.values)).reshape(list(each.shape.dims)) for each in told]
        starts = [each.start for each in told]
        whole = found[0]
        if told[0].HasField("dim"):
            assert starts == sorted(set(starts))
            whole = torch.cat(found, told[0].dim)
        assert torch.equal(whole, tensor[:5].float()), name
        assert {tuple(each.full_shape.dims) for each in told} == {tuple(tensor.shape)}
    parts += [part async for part in stream]
    assert len(merge(parts).samples[0].output_ids) == 40
    (report, *_) = await check(stage)
    assert report.model_digest == digest_of(stage.config.model_path)


async def test_too_many_rows_and_other_tensors_are_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_rows, "MOST_VALUES", 1000)
    name = "model.embed_tokens.weight"
    width = tensors_of(stage.config.model_path)[name].shape[1]
    await check(stage, CHECK_ACTION_READ, tensor=name, rows=1000 // width)
    for fields, field, words in (
        ({"tensor": name}, "rows", f"at most {1000 // width} rows"),
        ({"tensor": "model.nothing"}, "tensor", "no tensor 'model.nothing'"),
    ):
        with pytest.raises(RlctlError, match=words) as caught:
            await check(stage, CHECK_ACTION_READ, **fields)
        assert (caught.value.reason, caught.value.field) == (Reason.FIELD_INVALID, field)
        assert caught.value.outcome == OUTCOME_REJECTED


async def test_log_probabilities_of_prompts_are_those_of_the_model(stage: Stage) -> None:
    prompts = [[1, 2, 3, 4, 5], [7, 8]]
    request = CheckWeightsRequest(
        action=CHECK_ACTION_PROBE, prompts=[ProbePrompt(token_ids=prompt) for prompt in prompts]
    )
    with pytest.raises(RlctlError) as caught:
        await stage(request)
    assert caught.value.reason is Reason.ILLEGAL_STATE, "steps go on"
    stream = stage.stream([1, 2, 3], max_new_tokens=40, ignore_eos=True, temperature=0)
    parts = [await anext(stream)]
    await stage(PauseGenerationRequest(mode=PAUSE_MODE_IN_PLACE))
    reports = await stage(request)
    model = AutoModelForCausalLM.from_pretrained(stage.config.model_path)
    expected = Probe.of(model, prompts)
    assert [len(report.probed) for report in reports] == [2, 0][: len(reports)]
    for found, wanted in zip(reports[0].probed, expected.logprobs, strict=True):
        assert list(found.logprobs) == pytest.approx(wanted, abs=1e-4)
    for bad, reason in (([1, 10**6], Reason.FIELD_INVALID), ([1] * 10**5, Reason.PROMPT_TOO_LONG)):
        with pytest.raises(RlctlError) as caught:
            await stage(CheckWeightsRequest(action=CHECK_ACTION_PROBE, prompts=[ProbePrompt(token_ids=bad)]))
        assert (caught.value.reason, caught.value.field) == (reason, "prompts[0].token_ids")
    await stage(ContinueGenerationRequest())
    parts += [part async for part in stream]
    # What was frozen goes on as if nothing had happened.
    assert list(merge(parts).samples[0].output_ids) == await stage.tokens([1, 2, 3], 40)


async def test_decode_and_prefill_compute_with_the_same_weights(stage: Stage, checkpoints) -> None:
    check_decode = CheckWeightsRequest(action=CHECK_ACTION_DECODE)
    with pytest.raises(RlctlError) as caught:
        await stage(check_decode)
    assert caught.value.reason is Reason.ILLEGAL_STATE, "steps go on"
    stream = stage.stream([1, 2, 3], max_new_tokens=40, ignore_eos=True, temperature=0)
    parts = [await anext(stream)]
    await stage(PauseGenerationRequest(mode=PAUSE_MODE_IN_PLACE))
    for report in await stage(check_decode):
        assert (report.decode.sequences, report.decode.tokens) == (len(OUTPUTS), sum(OUTPUTS) - len(OUTPUTS))
        assert report.decode.difference < report.decode.tolerance == FLOORS["float32"]
    await stage(ContinueGenerationRequest())
    parts += [part async for part in stream]
    assert list(merge(parts).samples[0].output_ids) == await stage.tokens([1, 2, 3], 40), "what was frozen goes on"


@pytest.mark.parametrize("where", ["layer", "scores", "cache"])
@pytest.mark.parametrize("action", [CHECK_ACTION_PROBE, CHECK_ACTION_DECODE])
async def test_a_computation_that_finds_no_memory_is_refused_by_all_ranks_and_the_engine_lives(
    stage: Stage, action: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A co-located trainer may hold the memory. In the layer, the other ranks would wait for this rank."""

    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    rank = stage.engine._rank
    prompts = [ProbePrompt(token_ids=[1, 2, 3]), ProbePrompt(token_ids=[4, 5, 6, 7])]
    request = CheckWeightsRequest(action=action, prompts=prompts if action == CHECK_ACTION_PROBE else [])
    stream = stage.stream([1, 2, 3], max_new_tokens=40, ignore_eos=True, temperature=0)
    parts = [await anext(stream)]
    await stage(PauseGenerationRequest(mode=PAUSE_MODE_IN_PLACE))
    with monkeypatch.context() as patch:
        if where == "layer":
            patch.setattr(rank.model.module.model.layers[1].mlp.up_proj, "forward", fails)
        elif where == "scores":
            patch.setattr(torch, "log_softmax", fails)
        else:
            patch.setattr(rank.cache, "alike", fails)
        answers = await asyncio.wait_for(stage.ranks(request, within=60), 10)
    assert reasons(answers) == {(Reason.MEMORY_FULL, OUTCOME_REJECTED)}
    assert all("2.00 GiB" in answer.message for answer in answers if isinstance(answer, RlctlError))
    assert not stage.failures
    await stage(request)
    await stage(ContinueGenerationRequest())
    parts += [part async for part in stream]
    assert list(merge(parts).samples[0].output_ids) == await stage.tokens([1, 2, 3], 40), "what was frozen goes on"


async def test_tensors_that_differ_are_named_with_the_part_of_each_rank(stage: Stage) -> None:
    tensors = tensors_of(stage.config.model_path)
    right = {name: tensor_digest(name, tensor) for name, tensor in tensors.items()}
    (report, *_) = await check(stage, fingerprints=fingerprints(right))
    assert (report.difference.count, report.difference.tensors) == (0, len(right))
    cut = "model.layers.0.mlp.down_proj.weight"
    wrong = right | {cut: "0" * 64, "model.norm.weight": "0" * 64}
    reports = await check(stage, fingerprints=fingerprints(wrong))
    assert {(r.difference.count, r.difference.first) for r in reports} == {(2, cut)}
    parts = [report.difference.part for report in reports]
    if len(parts) == 1:
        assert (parts[0].digest, parts[0].differs) == (right[cut], True)
    else:
        assert [(p.dim, p.start) for p in parts] == [(1, 0), (1, tensors[cut].shape[1] // 2)]
        assert not any(part.HasField("differs") for part in parts)
        assert digest_parts(cut, tensors[cut], parts, tensors[cut].dtype) == parts
    reports = await check(stage, fingerprints=fingerprints(right | {"model.norm.weight": "0" * 64}))
    assert [report.difference.part.differs for report in reports] == [True] * len(reports)
    (report, *_) = await check(stage, fingerprints=b"12345678")
    assert (report.difference.count, report.difference.first) == (0, "")


@pytest.mark.parametrize("beside", [False, True])
async def test_a_rank_that_cannot_name_a_difference_takes_the_other_ranks_along(
    stage: Stage, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for this rank. It has them know its error, and all go on."""

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    if not beside:
        await stage(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    with monkeypatch.context() as patch:
        patch.setattr(check_weights, "difference", fails)
        request = CheckWeightsRequest(fingerprints=b"12345678")
        answers = await asyncio.wait_for(stage.ranks(request, within=60), 10)
    assert reasons(answers) == {(Reason.MEMORY_FULL, OUTCOME_REJECTED)}
    if not beside:
        await stage(ContinueGenerationRequest())
    assert (await check(stage))[0].model_digest == digest_of(stage.config.model_path)


@pytest.mark.parametrize("prompts", [["1+2="], [[1, 2], [1, "2"]]])
def test_a_probe_is_of_token_ids(prompts: list[Any]) -> None:
    with pytest.raises(RlctlError, match="token ids") as caught:
        Probe.of(tiny.make(0), prompts)
    assert caught.value.field == f"probe.prompts[{len(prompts) - 1}]"
