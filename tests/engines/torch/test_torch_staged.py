"""Staged updates: the old weights generate until the swap, the new ones after it, and nothing in between is served."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import torch
from rlctl_torch.model.model import Model
from rlctl_torch.model.sabotage import VARIABLE
from rlctl_torch.model.shadow_copy import Shadow
from rlctl_torch.verbs import update as updates
from test_torch_updates import all_refuse, check_serves, digest
from torch_models import dequantise_checkpoint, greedy, prompt_of, quantise_checkpoint
from torch_source import Source, digest_of, load, prepare, tensors_of
from torch_stage import Follower, Stage, until
from torch_trainer import request_of, write

from rlctl.contract.errors import Reason
from rlctl.v1.common_pb2 import (
    MEMORY_TAG_KV_CACHE,
    MEMORY_TAG_WEIGHTS,
    OUTCOME_REJECTED,
    PAUSE_MODE_IN_PLACE,
    PAUSE_MODE_RETRACT,
)
from rlctl.v1.verbs_pb2 import (
    APPLY_MODE_STAGED,
    CHECK_ACTION_RESET_TENSORS,
    UPDATE_KIND_PARTIAL,
    AbortUpdateRequest,
    CheckWeightsRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    DestroyWeightsUpdateGroupRequest,
    GetLoadsRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
    ReleaseMemoryRequest,
    ResumeMemoryRequest,
    SealUpdateRequest,
    UpdateWeightsFromDiskRequest,
)
from rlctl.weights.receiver import send
from rlctl.weights.shared_memory.sender import SegmentSender
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import as_source

PROMPT = prompt_of(9)
COUNT = 10
LONG = 60


@pytest.fixture(autouse=True)
async def as_before(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Tests of the shared stage leave it with the first checkpoint's weights and nothing open."""
    yield
    if "stage" in request.fixturenames:
        stage = request.getfixturevalue("stage")
        if stage.engine._rank.update is not None:
            await stage(AbortUpdateRequest(), update=stage.engine._rank.update.update_id)
        await load(stage, stage.config.model_path, abort_all_requests=True)
        await stage(ContinueGenerationRequest())


@pytest.fixture(scope="module")
def new(checkpoints) -> str:
    """A checkpoint with other weights."""
    return checkpoints(seed=1)


async def stage_update(stage: Stage, **fields: object) -> str:
    return await prepare(stage, apply=APPLY_MODE_STAGED, **fields)


async def swap(stage: Stage, update: str) -> list:
    """What the coordinator does once the copy is sealed; every rank's report."""
    await stage(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    reports = await stage(CommitUpdateRequest(), update=update)
    await stage(ContinueGenerationRequest())
    return reports


async def shadow_digest(stage: Stage, update: str) -> str:
    reports = await stage(CheckWeightsRequest(shadow=True), update=update)
    return {report.model_digest for report in reports}.pop()


async def by_group(stage: Stage, path: str, update: str) -> None:
    async with Source(stage) as source:
        await source.send(tensors_of(path), update)


async def by_disk(stage: Stage, path: str, update: str) -> None:
    await stage(UpdateWeightsFromDiskRequest(model_path=path, expected_digest=digest_of(path)), update=update)


async def by_memory(stage: Stage, path: str, update: str) -> None:
    sender = SegmentSender()
    sent = write(sender, path)
    await stage(request_of(sent), update=update)
    for segment in sent:
        segment.release()
    sender.close()


Fill = Callable[[Stage, str, str], Awaitable[None]]
WAYS = pytest.mark.parametrize("fill", [by_group, by_disk, by_memory])


@WAYS
async def test_the_old_weights_generate_until_the_swap_and_the_new_ones_after_it(
    stage: Stage, new: str, fill: Fill
) -> None:
    old = stage.config.model_path
    update = await stage_update(stage)
    assert await stage.tokens(PROMPT, COUNT) == greedy(old, PROMPT, COUNT)
    await fill(stage, new, update)
    await stage(SealUpdateRequest(), update=update)
    assert await shadow_digest(stage, update) == digest_of(new)
    await check_serves(stage, old)
    assert all(0 < report.swap.ToNanoseconds() < 30e9 for report in await swap(stage, update))
    await check_serves(stage, new)
    # And back again, in place: everything that knows where the weights lie has followed.
    await load(stage, old)
    await check_serves(stage, old)


async def test_a_copy_that_there_is_no_memory_for_is_refused(
    stage: Stage, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lacking(Shadow):
        def __init__(self, model: Model) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(updates, "Shadow", Lacking)
        error = await all_refuse(stage, PrepareUpdateRequest(apply=APPLY_MODE_STAGED), update="too large")
    assert (error.reason, error.outcome) == (Reason.MEMORY_FULL, OUTCOME_REJECTED)
    assert "16.00 GiB" in error.message
    await check_serves(stage, stage.config.model_path)
    update = await stage_update(stage)
    await by_disk(stage, new, update)
    await stage(SealUpdateRequest(), update=update)
    await swap(stage, update)
    await check_serves(stage, new)


async def test_requests_run_while_the_copy_is_filled(stage: Stage, new: str) -> None:
    old, tensors = stage.config.model_path, tensors_of(new)
    async with Source(stage) as source:
        update = await stage_update(stage)
        receiving = asyncio.create_task(stage(source.request(source.buckets(tensors)), update=update))
        await until(lambda: stage.engine._rank.update.receiver._busy)
        # The ranks wait for tensors that have not been sent, and generate.
        assert await stage.tokens(PROMPT, COUNT) == greedy(old, PROMPT, COUNT)
        assert (await stage(GetLoadsRequest()))[0].step > 0
        assert not receiving.done()
        sent = asyncio.to_thread(_send, source, tensors)
        await asyncio.gather(receiving, sent)
        await stage(SealUpdateRequest(), update=update)
    await swap(stage, update)
    await check_serves(stage, new)


def _send(source: Source, tensors: dict) -> None:
    send(as_source(tensors.items()), source.buckets(tensors), source.group)


@pytest.mark.parametrize("mode", [PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE])
async def test_a_request_that_runs_across_the_swap_is_treated_as_the_pause_says(
    stage: Stage, new: str, mode: int
) -> None:
    old = stage.config.model_path
    update = await stage_update(stage)
    await by_disk(stage, new, update)
    await stage(SealUpdateRequest(), update=update)
    output: list[int] = []
    swapped_at = 0
    async for message in stage.stream(PROMPT, temperature=0, ignore_eos=True, max_new_tokens=LONG):
        output += message.samples[0].output_ids
        if len(output) >= 3 and not swapped_at:
            await stage(PauseGenerationRequest(mode=mode))
            assert (await stage(GetLoadsRequest()))[0].running == (mode == PAUSE_MODE_IN_PLACE)
            await stage(CommitUpdateRequest(), update=update)
            await stage(ContinueGenerationRequest())
            swapped_at = len(output)
    assert len(output) == LONG
    before = greedy(old, PROMPT, LONG)
    assert output[:swapped_at] == before[:swapped_at]
    assert output != before
    if mode == PAUSE_MODE_RETRACT:
        at = next(n for n in range(LONG) if output[n] != before[n])
        assert output[at:] == greedy(new, PROMPT + output[:at], LONG - at)


async def test_a_source_that_dies_half_way_leaves_the_old_weights_serving(stage: Stage, new: str) -> None:
    old, tensors = stage.config.model_path, tensors_of(new)
    async with Source(stage) as source:
        update = await stage_update(stage)
        buckets = source.buckets(tensors)
        half = {meta.name: tensors[meta.name] for bucket in buckets[:2] for meta in bucket.metas}
        receiving = asyncio.create_task(all_refuse(stage, source.request(buckets), update=update))
        await asyncio.to_thread(send, as_source(half.items()), buckets[:2], source.group)
        source.group.close()
        error = await receiving
        assert (error.reason, error.outcome) == (Reason.GROUP_FAILED, OUTCOME_REJECTED)
        assert await stage.tokens(PROMPT, COUNT) == greedy(old, PROMPT, COUNT)
        error = await all_refuse(stage, SealUpdateRequest(), update=update)
        assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_REJECTED)
        await stage(AbortUpdateRequest(), update=update)
    await check_serves(stage, old)
    # Another attempt starts with nothing written.
    update = await stage_update(stage)
    await by_group(stage, new, update)
    await stage(PrepareUpdateRequest(apply=APPLY_MODE_STAGED), update=update)
    assert (await all_refuse(stage, SealUpdateRequest(), update=update)).reason is Reason.WEIGHTS_INCOMPLETE
    await by_group(stage, new, update)
    await stage(SealUpdateRequest(), update=update)
    await swap(stage, update)
    await check_serves(stage, new)


async def test_an_abort_drops_the_copy_and_leaves_the_stage_as_it_was(stage: Stage, new: str) -> None:
    old = stage.config.model_path
    update = await stage_update(stage)
    await by_disk(stage, new, update)
    await stage(SealUpdateRequest(), update=update)
    copy = weakref.ref(stage.engine._rank.update.shadow._copies[0][1])
    await stage(AbortUpdateRequest(), update=update)
    assert stage.engine._rank.update is None
    await asyncio.wait_for(until(lambda: copy() is None), 10)
    await check_serves(stage, old)
    assert (await all_refuse(stage, CommitUpdateRequest(), update=update)).reason is Reason.UPDATE_NOT_FOUND


async def test_the_swap_gives_the_earlier_weights_back(stage: Stage, new: str) -> None:
    update = await stage_update(stage)
    await by_disk(stage, new, update)
    await stage(SealUpdateRequest(), update=update)
    rank = stage.engine._rank
    copies = {copy.data_ptr() for _, copy in rank.update.shadow._copies}
    given: list[int] = []
    let_go = rank.beside.let_go
    rank.beside.let_go = lambda memory: (given.append(sum(t.nbytes for t in memory)), let_go(memory))[1]
    await swap(stage, update)
    rank.beside.let_go = let_go
    assert {tensor.data_ptr() for tensor in rank.model.tensors} == copies, "pointers were swapped, nothing was copied"
    assert given == [sum(tensor.nbytes for tensor in rank.model.tensors)]


async def test_a_wrong_digest_or_an_unsealed_copy_never_gets_to_the_swap(stage: Stage, new: str) -> None:
    old = stage.config.model_path
    update = await stage_update(stage)
    request = UpdateWeightsFromDiskRequest(model_path=new, expected_digest="0" * 64)
    error = await all_refuse(stage, request, update=update)
    assert (error.reason, error.outcome) == (Reason.DIGEST_MISMATCH, OUTCOME_REJECTED)
    await by_disk(stage, new, update)
    error = await all_refuse(stage, CheckWeightsRequest(shadow=True, expected_digest="0" * 64), update=update)
    assert error.reason is Reason.DIGEST_MISMATCH
    error = await all_refuse(stage, CommitUpdateRequest(), update=update)
    assert (error.reason, error.outcome) == (Reason.ILLEGAL_STATE, OUTCOME_REJECTED)
    await check_serves(stage, old)
    await stage(SealUpdateRequest(), update=update)
    await stage(AbortUpdateRequest(), update=update)
    await check_serves(stage, old)


async def test_a_swap_under_requests_is_refused(stage: Stage, new: str) -> None:
    update = await stage_update(stage)
    await by_disk(stage, new, update)
    await stage(SealUpdateRequest(), update=update)
    async for message in stage.stream(PROMPT, temperature=0, ignore_eos=True, max_new_tokens=LONG):
        error = await all_refuse(stage, CommitUpdateRequest(), update=update)
        assert (error.reason, error.outcome) == (Reason.ACTIVE_REQUESTS, OUTCOME_REJECTED)
        assert not message.samples[0].HasField("finish_reason")
        break
    await swap(stage, update)
    await check_serves(stage, new)


async def test_what_one_rank_cannot_take_in_no_rank_swaps(
    stage: Stage, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: str, *args: object, **kwargs: object) -> None:
        raise Reason.CHECKPOINT_NOT_FOUND.error(f"{path} is not mounted here", field="model_path")

    update = await stage_update(stage)
    monkeypatch.setattr("rlctl_torch.verbs.load_from_disk.open_stored", unreadable)  # at rank 0 only
    error = await all_refuse(stage, UpdateWeightsFromDiskRequest(model_path=new), update=update)
    assert (error.reason, error.outcome) == (Reason.CHECKPOINT_NOT_FOUND, OUTCOME_REJECTED)
    monkeypatch.undo()
    assert (await all_refuse(stage, SealUpdateRequest(), update=update)).outcome == OUTCOME_REJECTED
    await check_serves(stage, stage.config.model_path)


async def test_a_partial_update_keeps_the_rest(stage: Stage, new: str) -> None:
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")
    chosen = {name: tensors_of(new)[name] for name in names}
    update = await stage_update(stage, kind=UPDATE_KIND_PARTIAL)
    async with Source(stage) as source:
        await source.send(chosen, update)
    await stage(SealUpdateRequest(), update=update)
    await swap(stage, update)
    expected = ModelDigest()
    for name, tensor in {**tensors_of(stage.config.model_path), **chosen}.items():
        expected.add(name, tensor)
    assert await digest(stage) == expected.digest()


async def test_what_would_disturb_a_staged_update_waits_and_what_would_not_goes_on(stage: Stage, new: str) -> None:
    update = await stage_update(stage)
    for request in (
        ReleaseMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]),
        CheckWeightsRequest(action=CHECK_ACTION_RESET_TENSORS),
        PrepareUpdateRequest(),
    ):
        assert (await all_refuse(stage, request, update="another")).reason is Reason.UPDATE_IN_PROGRESS
    assert (await all_refuse(stage, CheckWeightsRequest(shadow=True), update="u")).reason is Reason.UPDATE_NOT_FOUND
    error = await all_refuse(
        stage, PrepareUpdateRequest(apply=APPLY_MODE_STAGED, abort_all_requests=True), update=update
    )
    assert (error.reason, error.field) == (Reason.FIELD_CONFLICT, "abort_all_requests")
    await stage(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    await stage(ContinueGenerationRequest())
    await check_serves(stage, stage.config.model_path)
    assert await digest(stage) == digest_of(stage.config.model_path)
    await stage(AbortUpdateRequest(), update=update)
    in_place = await prepare(stage)
    assert (await all_refuse(stage, SealUpdateRequest(), update=in_place)).reason is Reason.UPDATE_NOT_FOUND
    await stage(AbortUpdateRequest(), update=in_place)


async def test_memory_can_be_released_and_resumed_after_a_swap(stage: Stage, new: str) -> None:
    update = await stage_update(stage)
    await by_disk(stage, new, update)
    await stage(SealUpdateRequest(), update=update)
    await swap(stage, update)
    await stage(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT))
    await stage(ReleaseMemoryRequest())
    await stage(ResumeMemoryRequest(tags=[MEMORY_TAG_WEIGHTS]))
    await load(stage, new)
    await stage(ResumeMemoryRequest(tags=[MEMORY_TAG_KV_CACHE]))
    await stage(ContinueGenerationRequest())
    await check_serves(stage, new)


async def test_a_receive_that_outlasts_its_time_ends_and_nothing_else_does(stage: Stage, new: str) -> None:
    async with Source(stage) as source:
        update = await stage_update(stage)
        buckets = source.buckets(tensors_of(new))
        error = await all_refuse(stage, source.request(buckets), update=update, within=1.0)
        assert (error.reason, error.outcome) == (Reason.GROUP_FAILED, OUTCOME_REJECTED)
        await check_serves(stage, stage.config.model_path)
        await stage(AbortUpdateRequest(), update=update)
        source.group.close()
        await stage.ranks(DestroyWeightsUpdateGroupRequest(group_name=source.name))


@pytest.mark.parametrize(("family", "ranks"), [("qwen2-moe", 1), ("mixtral", 2), ("qwen3", 2)])
async def test_tied_weights_and_experts(checkpoints, follower: Follower, family: str, ranks: int) -> None:
    old, new = checkpoints(family), checkpoints(family, seed=1)
    stage = Stage(old, follower if ranks == 2 else None)
    await stage.start()
    try:
        for path in (new, old):
            update = await stage_update(stage)
            await by_group(stage, path, update)
            await stage(SealUpdateRequest(), update=update)
            assert await shadow_digest(stage, update) == digest_of(path)
            await swap(stage, update)
            await check_serves(stage, path)
    finally:
        await stage.stop()


@pytest.mark.parametrize(("family", "ranks"), [("odd", 2), ("odd-moe", 1)])
async def test_block_fp8(checkpoints, tmp_path, follower: Follower, family: str, ranks: int) -> None:
    quantised = [quantise_checkpoint(checkpoints(family, seed=seed), tmp_path / f"fp8-{seed}") for seed in range(2)]
    plain = dequantise_checkpoint(quantised[1], tmp_path / "plain")
    stage = Stage(quantised[0], follower if ranks == 2 else None, dtype="float32")
    await stage.start()
    try:
        update = await stage_update(stage)
        broken = {name: t * 0 if name.endswith("_scale_inv") else t for name, t in tensors_of(quantised[1]).items()}
        async with Source(stage) as source:
            await source.send(broken, update)
        error = await all_refuse(stage, SealUpdateRequest(), update=update)
        assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_REJECTED)
        assert await digest(stage) == digest_of(quantised[0])
        await stage(PrepareUpdateRequest(apply=APPLY_MODE_STAGED), update=update)
        await by_group(stage, quantised[1], update)
        await stage(SealUpdateRequest(), update=update)
        await swap(stage, update)
        assert await digest(stage) == digest_of(quantised[1])
        assert await stage.tokens(PROMPT, COUNT) == greedy(plain, PROMPT, COUNT)
    finally:
        await stage.stop()


@pytest.mark.parametrize("way", ["stale", "drop-tensor:model.norm.weight", "wrong-rank"])
async def test_the_negative_controls_show_before_the_swap(
    checkpoints, follower: Follower, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, way)
    follower.ask("set_environment", VARIABLE, way)[1].result()
    stage = Stage(checkpoints(), follower)
    try:
        await stage.start()
        update = await stage_update(stage)
        await by_group(stage, checkpoints(seed=1), update)
        await stage(SealUpdateRequest(), update=update)
        assert await shadow_digest(stage, update) != digest_of(checkpoints(seed=1))
        await stage(AbortUpdateRequest(), update=update)
        await check_serves(stage, checkpoints())
    finally:
        await stage.stop()
        follower.ask("set_environment", VARIABLE, None)[1].result()
