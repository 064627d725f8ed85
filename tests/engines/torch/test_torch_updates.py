"""Weight updates: the new weights are what generates afterwards, and nothing else is ever taken for them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import rlctl_torch.generation.scheduler
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore
from torch_models import greedy, make_checkpoint, prompt_of, reference_logprobs
from torch_source import Source, digest_of, load, prepare, tensors_of
from torch_stage import Stage, until

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED, PAUSE_MODE_IN_PLACE, PAUSE_MODE_RETRACT
from rlctl.v1.rollout_pb2 import FINISH_TYPE_ABORT, FINISH_TYPE_LENGTH
from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_ADAPTER,
    UPDATE_KIND_PARTIAL,
    AbortUpdateRequest,
    CheckWeightsRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    DestroyWeightsUpdateGroupRequest,
    GetLoadsRequest,
    GetModelInfoRequest,
    PauseGenerationRequest,
    PrepareUpdateRequest,
    UpdateWeightsFromDiskRequest,
)
from rlctl.weights.receiver import send
from rlctl.weights.tensor.buckets import room_for
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.source import as_source

PROMPT = prompt_of(9)
COUNT = 10


@pytest.fixture(autouse=True)
async def as_before(stage: Stage) -> AsyncIterator[None]:
    """Every test starts and ends with the first checkpoint's weights and nothing open."""
    yield
    if stage.engine._rank.update is not None:
        await stage(AbortUpdateRequest(), update=stage.engine._rank.update.update_id)
    await load(stage, stage.config.model_path, abort_all_requests=True)
    await stage(ContinueGenerationRequest())


@pytest.fixture(scope="module")
def new(checkpoints) -> str:
    """A checkpoint with other weights."""
    return checkpoints(seed=1)


async def digest(stage: Stage) -> str:
    reports = await stage(CheckWeightsRequest())
    assert len({report.model_digest for report in reports}) == 1
    return reports[0].model_digest


async def check_serves(stage: Stage, path: str) -> None:
    assert await stage.tokens(PROMPT, COUNT) == greedy(path, PROMPT, COUNT)
    assert await digest(stage) == digest_of(path)


async def all_refuse(stage: Stage, request, *, update: str = "", within: float = 30.0) -> RlctlError:
    """Rank 0's refusal; every rank refuses, for the same reason and with the same outcome."""
    answers = await stage.ranks(request, update=update, within=within)
    assert all(isinstance(answer, RlctlError) for answer in answers), answers
    assert len({(answer.reason, answer.outcome) for answer in answers}) == 1, answers
    return answers[0]


async def test_from_disk(stage: Stage, new: str) -> None:
    update = await prepare(stage)
    reports = await stage(UpdateWeightsFromDiskRequest(model_path=new, expected_digest=digest_of(new)), update=update)
    assert all(report.tensors == len(tensors_of(new)) for report in reports)
    await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)
    assert [info.model_path for info in await stage(GetModelInfoRequest())] == [new] * len(reports)


async def test_from_a_source(stage: Stage, new: str) -> None:
    tensors = tensors_of(new)
    async with Source(stage) as source:
        assert {bucket.flattened for bucket in source.buckets(tensors)} == {True, False}
        update = await prepare(stage)
        reports, sent = await source.send(tensors, update)
        for report in reports:
            assert report.tensors == len(tensors)
            assert report.bytes_received == sum(tensor.nbytes for tensor in tensors.values())
            assert report.transfer.ToNanoseconds() > 0
        assert (await stage(CommitUpdateRequest(), update=update))[0].tensors == len(tensors)
        assert sent == digest_of(new)
        await check_serves(stage, new)
        # The group stands: a second update needs no other.
        update = await prepare(stage)
        await source.send(tensors_of(stage.config.model_path), update)
        await stage(CommitUpdateRequest(), update=update)
        await check_serves(stage, stage.config.model_path)


async def test_buckets_come_in_several_calls(stage: Stage, new: str) -> None:
    tensors = tensors_of(new)
    async with Source(stage) as source:
        update = await prepare(stage)
        buckets = source.buckets(tensors)
        assert len(buckets) >= 3
        sending = asyncio.create_task(asyncio.to_thread(send, as_source(tensors.items()), buckets, source.group))
        for bucket in buckets:
            (report, *_) = await stage(source.request([bucket]), update=update)
        await sending
        assert report.tensors == len(tensors), "reports add up over the update"
        await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_requests_that_wait_generate_with_the_new_weights(stage: Stage, new: str) -> None:
    update = await prepare(stage)
    waiting = asyncio.create_task(stage.tokens(PROMPT, COUNT))
    await stage(UpdateWeightsFromDiskRequest(model_path=new), update=update)
    assert (await stage(GetLoadsRequest()))[0].waiting == 1
    await stage(CommitUpdateRequest(), update=update)
    assert await waiting == greedy(new, PROMPT, COUNT)


@pytest.mark.parametrize("mode", [PAUSE_MODE_RETRACT, PAUSE_MODE_IN_PLACE])
async def test_requests_survive_an_update_under_a_pause(stage: Stage, new: str, mode: int) -> None:
    messages = []
    async for message in stage.stream(PROMPT, temperature=0, ignore_eos=True, max_new_tokens=60):
        messages.append(message)
        if len(messages) == 3:
            await stage(PauseGenerationRequest(mode=mode))
            await load(stage, new)
            await stage(ContinueGenerationRequest())
    output = [token for message in messages for token in message.samples[0].output_ids]
    old = greedy(stage.config.model_path, PROMPT, 60)
    assert len(output) == 60
    assert output[:3] == old[:3]
    assert output != old
    if mode == PAUSE_MODE_RETRACT:
        at = next(n for n in range(60) if output[n] != old[n])
        # From the update on every token is the new weights', KV entries of the old ones are gone.
        assert output[at:] == greedy(new, PROMPT + output[:at], 60 - at)


async def test_a_prompt_is_not_scored_by_two_versions(
    stage: Stage, new: str, gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a retracted prompt has of its log probabilities is found anew with its KV entries."""
    monkeypatch.setattr(rlctl_torch.generation.scheduler, "PREFILL_TOKENS", 16)
    prompt = prompt_of(60)
    scoring = asyncio.create_task(stage.generate(prompt, temperature=0, max_new_tokens=0, logprob_start_len=0))
    gate.allow(2)
    await until(lambda: gate.steps == 2 and gate.held)
    pausing = asyncio.create_task(stage(PauseGenerationRequest(mode=PAUSE_MODE_RETRACT)))
    await until(lambda: stage.engine._commands.waiting)
    gate.open()
    await pausing
    await load(stage, new)
    await stage(ContinueGenerationRequest())
    first, *rest = (await scoring).input_logprobs
    assert (first.token_id, first.HasField("logprob")) == (prompt[0], False)
    rows = reference_logprobs(new, prompt)
    assert [entry.token_id for entry in rest] == prompt[1:]
    assert all(abs(entry.logprob - float(rows[i, entry.token_id])) < 1e-4 for i, entry in enumerate(rest))


async def test_active_requests_keep_an_update_out_unless_aborted(stage: Stage, gate) -> None:
    tasks = [
        asyncio.create_task(stage.generate(PROMPT, rid=f"r{n:02}", max_new_tokens=100, ignore_eos=True))
        for n in range(20)
    ]

    def all_active() -> bool:
        # The first step may have begun before the last of them came.
        gate.let_go()
        return len(stage.engine._rank.scheduler.active) == 20

    await until(all_active)
    refusing = asyncio.create_task(all_refuse(stage, PrepareUpdateRequest(), update="u"))
    await until(lambda: stage.engine._commands.waiting or refusing.done())
    gate.open()
    error = await refusing
    assert (error.reason, error.outcome) == (Reason.ACTIVE_REQUESTS, OUTCOME_REJECTED)
    assert error.metadata == {"count": "20", "rids": ",".join(f"r{n:02}" for n in range(16))}
    update = await prepare(stage, abort_all_requests=True)
    assert {(await task).samples[0].finish_reason.type for task in tasks} <= {FINISH_TYPE_ABORT, FINISH_TYPE_LENGTH}
    await stage(AbortUpdateRequest(), update=update)
    # Nothing was written: it serves as before.
    await check_serves(stage, stage.config.model_path)


async def test_a_full_update_is_not_committed_with_tensors_missing(stage: Stage, new: str) -> None:
    tensors = tensors_of(new)
    left_out = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    async with Source(stage) as source:
        update = await prepare(stage)
        error = await all_refuse(stage, CommitUpdateRequest(), update=update)
        assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_REJECTED)
        await source.send({name: t for name, t in tensors.items() if name not in left_out}, update)
        error = await all_refuse(stage, CommitUpdateRequest(), update=update)
        assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_DIRTY)
        assert error.metadata["missing"].split("\n") == left_out
        await stage(AbortUpdateRequest(), update=update)
    error = await all_refuse(stage, ContinueGenerationRequest())
    assert error.reason is Reason.WEIGHTS_DIRTY
    error = await all_refuse(stage, PrepareUpdateRequest(kind=UPDATE_KIND_PARTIAL), update="partial")
    assert error.reason is Reason.WEIGHTS_DIRTY
    waiting = asyncio.create_task(stage.tokens(PROMPT, COUNT))
    await stage(GetLoadsRequest())
    assert not waiting.done()
    update = await prepare(stage, abort_all_requests=True)
    assert await waiting == [], "nothing was generated with a mixture"
    await stage(UpdateWeightsFromDiskRequest(model_path=new), update=update)
    await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_a_partial_update_writes_what_it_has(stage: Stage, new: str) -> None:
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")
    chosen = {name: tensors_of(new)[name] for name in names}
    async with Source(stage) as source:
        update = await prepare(stage, kind=UPDATE_KIND_PARTIAL)
        await source.send(chosen, update)
        await stage(CommitUpdateRequest(), update=update)
    expected = ModelDigest()
    for name, tensor in {**tensors_of(stage.config.model_path), **chosen}.items():
        expected.add(name, tensor)
    assert await digest(stage) == expected.digest()
    assert len(await stage.tokens(PROMPT, 3)) == 3


async def test_what_does_not_fit_is_refused_before_anything_is_written(stage: Stage, new: str, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen2")
    lacking = Path(make_checkpoint(tmp_path / "lacking", "llama", seed=2))
    tensors = tensors_of(str(lacking))
    tensors.pop("model.norm.weight")
    save_file({**tensors, "model.stray.weight": tensors["lm_head.weight"].clone()}, lacking / "model.safetensors")
    rotary = Path(make_checkpoint(tmp_path / "rotary", "llama", seed=2))
    config = json.loads((rotary / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 123.0
    (rotary / "config.json").write_text(json.dumps(config))
    update = await prepare(stage)
    for path, reason, words in (
        (str(tmp_path / "nowhere"), Reason.CHECKPOINT_NOT_FOUND, "nowhere"),
        (other, Reason.CHECKPOINT_MISMATCH, "model_type"),
        (str(lacking), Reason.CHECKPOINT_MISMATCH, "model.stray.weight"),
        (str(rotary), Reason.CHECKPOINT_MISMATCH, "rope_parameters"),
    ):
        error = await all_refuse(stage, UpdateWeightsFromDiskRequest(model_path=path), update=update)
        assert (error.reason, error.outcome) == (reason, OUTCOME_REJECTED)
        assert words in error.message
    error = await all_refuse(stage, UpdateWeightsFromDiskRequest(model_path=new, load_format="pt"), update=update)
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "load_format")
    assert "safetensors" in error.message
    await stage(AbortUpdateRequest(), update=update)
    await check_serves(stage, stage.config.model_path)


async def test_a_checkpoint_that_only_one_rank_cannot_read_is_refused_by_all(
    stage: Stage, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: str, *args: object, **kwargs: object):
        raise Reason.CHECKPOINT_NOT_FOUND.error(f"{path} is not mounted here", field="model_path")

    monkeypatch.setattr("rlctl_torch.verbs.load_from_disk.open_stored", unreadable)
    update = await prepare(stage)
    error = await all_refuse(stage, UpdateWeightsFromDiskRequest(model_path=new), update=update)
    assert (error.reason, error.outcome) == (Reason.CHECKPOINT_NOT_FOUND, OUTCOME_REJECTED)
    monkeypatch.undo()
    await stage(UpdateWeightsFromDiskRequest(model_path=new), update=update)
    await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_steps_belong_to_the_open_update(stage: Stage, new: str) -> None:
    disk = UpdateWeightsFromDiskRequest(model_path=new)
    assert (await all_refuse(stage, disk, update="none")).reason is Reason.UPDATE_NOT_FOUND
    assert (await all_refuse(stage, CommitUpdateRequest(), update="none")).reason is Reason.UPDATE_NOT_FOUND
    assert (await all_refuse(stage, PrepareUpdateRequest())).field == "header.fence.update_id"
    await stage(AbortUpdateRequest(), update="none")
    update = await prepare(stage)
    for request in (disk, CommitUpdateRequest(), AbortUpdateRequest()):
        assert (await all_refuse(stage, request, update="another")).reason is Reason.UPDATE_FENCED
    error = await all_refuse(stage, PrepareUpdateRequest(), update="another")
    assert error.reason is Reason.UPDATE_IN_PROGRESS
    assert (await all_refuse(stage, ContinueGenerationRequest())).reason is Reason.UPDATE_IN_PROGRESS
    await stage(PrepareUpdateRequest(), update=update)
    await stage(AbortUpdateRequest(), update=update)
    error = await all_refuse(stage, PrepareUpdateRequest(kind=UPDATE_KIND_ADAPTER), update="u")
    assert (error.reason, error.field) == (Reason.FIELD_REQUIRED, "adapter.name")


async def test_buckets_are_checked_before_the_first_byte(stage: Stage, new: str) -> None:
    tensors = tensors_of(new)
    async with Source(stage) as source:
        update = await prepare(stage)
        buckets = source.buckets(tensors)
        unknown = source.request(buckets)
        unknown.group_name = "unheard of"
        assert (await all_refuse(stage, unknown, update=update)).reason is Reason.GROUP_NOT_FOUND
        gap = source.request(buckets[1:])
        assert (await all_refuse(stage, gap, update=update)).field == "buckets[0].sequence"
        shape = source.request(buckets)
        shape.buckets[0].shapes[0].dims[0] += 1
        error = await all_refuse(stage, shape, update=update)
        assert (error.reason, error.field) == (Reason.FIELD_INVALID, "buckets[0].shapes[0]")
        short = source.request(buckets)
        del short.buckets[0].dtypes[0]
        assert (await all_refuse(stage, short, update=update)).reason is Reason.LENGTH_MISMATCH
        await source.send(tensors, update)
        await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_nobody_waits_for_the_group_of_an_update_that_was_given_up(stage: Stage) -> None:
    """Its source comes no more; a helper thread of each rank would wait for it as long as the update was to take."""
    source = Source(stage)
    joining = asyncio.create_task(stage.ranks(source.init_request(), update="given up", within=60))
    client = TCPStore(*source.store.local_address, None, False, wait_for_workers=False)
    await until(lambda: bool(client.list_keys()))
    await stage.interrupt("another update")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(joining), 0.2)
    await stage.interrupt("given up")
    for error in await asyncio.wait_for(joining, 10):
        assert isinstance(error, RlctlError)
        assert (error.reason, error.outcome) == (Reason.GROUP_FAILED, OUTCOME_REJECTED)
    source.store.close()


async def test_updates_whose_source_has_gone_do_not_hold_up_the_next_one(stage: Stage) -> None:
    gone = Source(stage)
    gone.store.close()
    held = socket.socket()  # bound and not listening: no other store gets the address
    held.bind(("127.0.0.1", 0))
    host, port = held.getsockname()
    request = gone.init_request(probe_only=True, master_address=host, master_port=port)
    many = 2 * (min(32, (os.cpu_count() or 1) + 4) + 1)  # more than there are helper threads
    asked = [asyncio.create_task(stage.ranks(request, update=f"gone-{number}", within=60)) for number in range(many)]
    async with Source(stage):
        pass
    for errors in await asyncio.gather(*asked):
        assert {error.reason for error in errors if isinstance(error, RlctlError)} == {Reason.UNREACHABLE}
    held.close()


async def test_a_blocked_receive_is_interrupted_within_a_second(stage: Stage, new: str) -> None:
    async with Source(stage) as source:
        update = await prepare(stage)
        receiving = asyncio.create_task(stage.ranks(source.request(source.buckets(tensors_of(new))), update=update))
        await stage.receiving()
        await stage.interrupt("another update")
        assert not receiving.done()
        started = time.monotonic()
        await stage.interrupt(update)
        errors = await receiving
        assert time.monotonic() - started < 1.0
        assert all(isinstance(error, RlctlError) and error.reason is Reason.GROUP_FAILED for error in errors), errors
        assert {error.outcome for error in errors if isinstance(error, RlctlError)} == {OUTCOME_DIRTY}
        await stage(AbortUpdateRequest(), update=update)
    refused, *_ = await stage.ranks(ContinueGenerationRequest())
    assert isinstance(refused, RlctlError)
    assert refused.reason is Reason.WEIGHTS_DIRTY
    # The failed group is forgotten: a new one forms, and a full update makes the weights whole.
    async with Source(stage) as source:
        update = await prepare(stage)
        await source.send(tensors_of(new), update)
        await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_a_receive_whose_sender_never_comes_ends_by_its_deadline(stage: Stage, new: str) -> None:
    async with Source(stage) as source:
        update = await prepare(stage)
        started = time.monotonic()
        request = source.request(source.buckets(tensors_of(new)))
        error = await all_refuse(stage, request, update=update, within=1.5)
        assert time.monotonic() - started < 1.5
        assert error.reason is Reason.GROUP_FAILED
        assert "the time was up" in error.message


async def test_what_was_left_to_the_call_that_formed_a_group_limits_no_later_one(stage: Stage, new: str) -> None:
    tensors = tensors_of(new)
    async with Source(stage, timeout=1.5) as source:
        update = await prepare(stage)
        buckets = source.buckets(tensors)
        receiving = asyncio.create_task(stage(source.request(buckets), update=update))
        await asyncio.sleep(2.0)  # longer than that call had
        await asyncio.to_thread(send, as_source(tensors.items()), buckets, source.group)
        await receiving
        await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_a_sender_that_dies_fails_the_receive_at_once(stage: Stage, new: str) -> None:
    source = await Source(stage).__aenter__()
    update = await prepare(stage)
    receiving = asyncio.create_task(all_refuse(stage, source.request(source.buckets(tensors_of(new))), update=update))
    await stage.receiving()
    started = time.monotonic()
    source.group.close()
    assert (await receiving).reason is Reason.GROUP_FAILED
    assert time.monotonic() - started < 2.0
    source.store.close()
    # The spent group is forgotten: a source that comes back forms one of the same name.
    again = Source(stage)
    again.name = source.name
    async with again:
        await stage(PrepareUpdateRequest(), update=update)
        await again.send(tensors_of(new), update)
        await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_a_receive_that_finds_no_memory_ends_for_all_and_the_engine_lives(
    stage: Stage, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a bucket's buffer, say: how large one is the trainer decides."""
    counts = itertools.count()

    def few(nbytes: int, buffer: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        if next(counts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")
        return room_for(nbytes, buffer, device)

    async with Source(stage) as source:
        update = await prepare(stage)
        buckets = source.buckets(tensors_of(new))
        with monkeypatch.context() as patch:
            patch.setattr("rlctl.weights.receiver.room_for", few)
            sending = asyncio.to_thread(send, as_source(tensors_of(new).items()), buckets, source.group)
            started = time.monotonic()
            answers, sent = await asyncio.gather(
                stage.ranks(source.request(buckets), update=update), sending, return_exceptions=True
            )
        assert time.monotonic() - started < 5.0
        assert [answer.reason for answer in answers] == [Reason.MEMORY_FULL, Reason.GROUP_FAILED][: len(answers)]
        assert "4.00 GiB" in answers[0].message
        assert answers[0].outcome == OUTCOME_DIRTY, "something had come before"
        assert isinstance(sent, RlctlError)
        assert sent.reason is Reason.GROUP_FAILED
    assert not stage.failures
    async with Source(stage) as source:
        await stage(PrepareUpdateRequest(), update=update)
        await source.send(tensors_of(new), update)
        await stage(CommitUpdateRequest(), update=update)
    await check_serves(stage, new)


async def test_a_partial_update_is_not_committed_with_a_tensor_half_written(stage: Stage, new: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = {name: tensors_of(new)[name]}
    async with Source(stage) as source:
        update = await prepare(stage, kind=UPDATE_KIND_PARTIAL)
        receiving = asyncio.create_task(stage.ranks(source.request(source.buckets(tensor)), update=update))
        await stage.receiving()
        await stage.interrupt(update)
        await receiving
    error = await all_refuse(stage, CommitUpdateRequest(), update=update)
    assert (error.reason, error.metadata["missing"]) == (Reason.WEIGHTS_INCOMPLETE, name)
    # Sent again in the same update, it is complete.
    async with Source(stage) as source:
        await stage(PrepareUpdateRequest(kind=UPDATE_KIND_PARTIAL), update=update)
        await source.send(tensor, update)
        await stage(CommitUpdateRequest(), update=update)
    expected = ModelDigest()
    for key, value in {**tensors_of(stage.config.model_path), **tensor}.items():
        expected.add(key, value)
    assert await digest(stage) == expected.digest()


async def test_groups_are_confirmed_refused_and_left(stage: Stage) -> None:
    async with Source(stage) as source:
        reports = await stage(source.init_request())
        assert [(r.group_rank, r.world_size) for r in reports] == [
            (1 + n, 1 + source.ranks) for n in range(source.ranks)
        ]
        for fields in ({"world_size": 5 + source.ranks}, {"rank_offset": 2}, {"master_port": 1}):
            error = await all_refuse(stage, source.init_request(**fields))
            assert error.reason is Reason.GROUP_EXISTS
    error = await all_refuse(stage, DestroyWeightsUpdateGroupRequest(group_name=source.name))
    assert error.reason is Reason.GROUP_NOT_FOUND
    error = await all_refuse(stage, source.init_request(backend="nccl"))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "backend")


async def test_a_group_that_does_not_come_about_costs_its_deadline_and_blocks_nobody(stage: Stage) -> None:
    source = Source(stage)
    started = time.monotonic()
    joining = asyncio.create_task(all_refuse(stage, source.init_request(), within=1.5))
    await asyncio.sleep(0)
    assert len(await stage.tokens(PROMPT, 5)) == 5
    error = await joining
    assert error.reason is Reason.GROUP_FAILED
    assert time.monotonic() - started < 2.5
    source.store.close()
