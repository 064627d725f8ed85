"""Updates out of shared memory: the same promises as over a group, and no rank reads what is not, or no longer, its."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from shared_memory import held
from test_torch_updates import all_refuse, check_serves
from torch_source import digest_of, load, prepare, tensors_of
from torch_stage import Stage, until
from torch_trainer import Trainer, request_of, write

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import (
    UPDATE_KIND_PARTIAL,
    AbortUpdateRequest,
    CommitUpdateRequest,
    ContinueGenerationRequest,
    UpdateWeightsFromTensorRequest,
)
from rlctl.weights.shared_memory import reader as segment_reader
from rlctl.weights.shared_memory.sender import SegmentSender
from rlctl.weights.tensor.digest import ModelDigest, combine
from rlctl.weights.tensor.placement import SHARED_MEMORY
from rlctl.weights.tensor.source import as_source


@pytest.fixture(autouse=True)
async def as_before(stage: Stage) -> AsyncIterator[None]:
    """Every test starts and ends with the first checkpoint's weights and nothing open."""
    yield
    if stage.engine._rank.update is not None:
        await stage(AbortUpdateRequest(), update=stage.engine._rank.update.update_id)
    await load(stage, stage.config.model_path)
    await stage(ContinueGenerationRequest())


@pytest.fixture(scope="module")
def new(checkpoints) -> str:
    """A checkpoint with other weights."""
    return checkpoints(seed=1)


@pytest.fixture
def sender() -> Iterator[SegmentSender]:
    sender = SegmentSender()
    yield sender
    sender.close()


async def take(stage: Stage, request: UpdateWeightsFromTensorRequest, **fields: object) -> list:
    """A whole update out of one request; every rank's report."""
    update = await prepare(stage, **fields)
    reports = await stage(request, update=update)
    await stage(CommitUpdateRequest(), update=update)
    return reports


async def test_updates_out_of_shared_memory(stage: Stage, new: str, sender: SegmentSender) -> None:
    old = stage.config.model_path
    mapped = set()
    for path in (new, old, new):
        digest = ModelDigest()
        sent = write(sender, path, digest=digest)
        reports = await take(stage, request_of(sent))
        for segment in sent:
            segment.release()
        for report in reports:
            assert report.tensors == len(tensors_of(path))
            assert report.bytes_received == sum(tensor.nbytes for tensor in tensors_of(path).values())
            assert report.load.ToNanoseconds() > 0
        assert digest.digest() == digest_of(path)
        await check_serves(stage, path)
        mapped.add(tuple(stage.engine._rank.segments.mapped))
    assert sender.pool.allocations == 1, "from the second update on nothing is allocated"
    assert len(mapped) == 1, "nor mapped"


async def test_two_trainer_processes_feed_an_engine_in_one_go(stage: Stage, new: str) -> None:
    trainers = [Trainer(part, 2) for part in range(2)]
    for path in (new, stage.config.model_path, new):
        (first, theirs), (second, others) = (trainer.write(path) for trainer in trainers)
        assert not theirs.keys() & others.keys()
        reports = await take(stage, UpdateWeightsFromTensorRequest(segments=[*first, *second]))
        assert all(report.tensors == len(tensors_of(path)) for report in reports)
        assert combine({**theirs, **others}) == digest_of(path)
        await check_serves(stage, path)
    for trainer in trainers:
        trainer.kill()
    SegmentSender().close()


async def test_segments_come_in_several_calls_while_others_are_written(stage: Stage, new: str) -> None:
    sender = SegmentSender(segment_bytes=64 << 10)
    update = await prepare(stage)
    source, digest, calls = as_source(tensors_of(new).items()), ModelDigest(), 0
    writing = sender.write(source, source.metas(), digest=digest)
    reading = asyncio.create_task(asyncio.sleep(0))
    while (sent := await asyncio.to_thread(next, writing, None)) is not None:
        await reading
        reading = asyncio.create_task(stage(request_of([sent]), update=update))
        reading.add_done_callback(lambda _, sent=sent: sent.release())
        calls += 1
    reports = await reading
    assert calls > 4
    assert all(report.tensors == len(source.metas()) for report in reports)
    await stage(CommitUpdateRequest(), update=update)
    assert digest.digest() == digest_of(new)
    await check_serves(stage, new)
    sender.close()


async def test_a_partial_update(stage: Stage, new: str, sender: SegmentSender) -> None:
    names = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    sent = write(sender, new, names)
    update = await prepare(stage)
    await stage(request_of(sent), update=update)
    error = await all_refuse(stage, CommitUpdateRequest(), update=update)
    assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_DIRTY)
    await stage(AbortUpdateRequest(), update=update)
    await load(stage, stage.config.model_path)
    reports = await take(stage, request_of(sent), kind=UPDATE_KIND_PARTIAL)
    assert all(report.tensors == 2 for report in reports)


async def test_what_cannot_be_read_is_refused_before_the_first_byte(
    stage: Stage, new: str, sender: SegmentSender
) -> None:
    sent = write(sender, new)
    update = await prepare(stage)

    def changed(change: Callable[[UpdateWeightsFromTensorRequest], object]) -> UpdateWeightsFromTensorRequest:
        request = request_of(sent)
        change(request)
        return request

    gone = SegmentSender()
    vanished = request_of(write(gone, new))
    gone.close()
    cut = SegmentSender()
    truncated = request_of(write(cut, new))
    with (SHARED_MEMORY / truncated.segments[0].shared_memory).open("r+b") as file:
        file.truncate(4096)
    for request, reason, field in (
        (vanished, Reason.SEGMENT_NOT_FOUND, "segments[0].shared_memory"),
        (truncated, Reason.FIELD_INVALID, "segments[0].size"),
        (changed(lambda r: setattr(r.segments[0], "node", "elsewhere")), Reason.NOT_COLOCATED, "segments"),
        (changed(lambda r: setattr(r.segments[0], "device", "GPU-0")), Reason.NOT_COLOCATED, "segments"),
        (changed(lambda r: r.segments[0].lease.CopyFrom(duration(1e-6))), Reason.SEGMENT_EXPIRED, "segments[0]"),
        (changed(lambda r: setattr(r.segments[0], "generation", 9)), Reason.SEGMENT_EXPIRED, "segments[0]"),
        (changed(lambda r: r.segments.append(r.segments[0])), Reason.FIELD_INVALID, "segments.tensors"),
        (
            changed(lambda r: setattr(r.segments[0].tensors[1], "offset", 1 << 40)),
            Reason.FIELD_INVALID,
            "segments[0].tensors[1].offset",
        ),
        (
            changed(lambda r: setattr(r.segments[0].tensors[0], "name", "stray")),
            Reason.FIELD_INVALID,
            "segments[0].tensors[0].name",
        ),
        (request_of(sent, load_format="direct"), Reason.UNSUPPORTED, "load_format"),
        (request_of(sent, engine_payloads=[b"pickle"]), Reason.UNSUPPORTED, "engine_payloads"),
    ):
        error = await all_refuse(stage, request, update=update)
        assert (error.reason, error.field, error.outcome) == (reason, field, OUTCOME_REJECTED), error
    cut.close()
    assert (await all_refuse(stage, request_of(sent), update="another")).reason is Reason.UPDATE_FENCED
    await stage(AbortUpdateRequest(), update=update)
    assert (await all_refuse(stage, request_of(sent), update=update)).reason is Reason.UPDATE_NOT_FOUND
    # Nothing was written: it serves as before.
    await stage(ContinueGenerationRequest())
    await check_serves(stage, stage.config.model_path)
    await take(stage, request_of(sent))
    await check_serves(stage, new)


async def test_what_only_one_rank_cannot_map_is_refused_by_all(
    stage: Stage, new: str, sender: SegmentSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_here(*_: object) -> None:
        raise Reason.SEGMENT_NOT_FOUND.error("another container")

    update = await prepare(stage)
    monkeypatch.setattr(segment_reader, "open_memory", not_here)
    error = await all_refuse(stage, request_of(write(sender, new)), update=update)
    assert (error.reason, error.outcome) == (Reason.SEGMENT_NOT_FOUND, OUTCOME_REJECTED)
    await stage(AbortUpdateRequest(), update=update)
    await stage(ContinueGenerationRequest())
    await check_serves(stage, stage.config.model_path)


async def test_a_lease_that_runs_out_leaves_the_stage_dirty(
    stage: Stage, new: str, sender: SegmentSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = stage.engine._rank.writable
    place, placed = shards.place, []

    def slowly(name: str, full: object) -> None:
        place(name, full)
        placed.append(name)
        time.sleep(0.3)

    monkeypatch.setattr(shards, "place", slowly)
    update = await prepare(stage)
    request = request_of(write(sender, new, lease_s=0.5))
    error, *others = await stage.ranks(request, update=update)
    assert isinstance(error, RlctlError)
    assert (error.reason, error.outcome) == (Reason.SEGMENT_EXPIRED, OUTCOME_DIRTY)
    assert len(placed) < len(tensors_of(new))
    assert not any(isinstance(other, RlctlError) for other in others), "each rank answers for itself"
    monkeypatch.undo()
    error = await all_refuse(stage, CommitUpdateRequest(), update=update)
    assert (error.reason, error.outcome) == (Reason.WEIGHTS_INCOMPLETE, OUTCOME_DIRTY)
    await stage(AbortUpdateRequest(), update=update)
    assert (await all_refuse(stage, ContinueGenerationRequest())).reason is Reason.WEIGHTS_DIRTY
    again = SegmentSender()
    await take(stage, request_of(write(again, new)))
    again.close()
    await check_serves(stage, new)


async def test_once_all_have_agreed_to_read_a_rank_that_fails_is_dirty(
    stage: Stage, new: str, sender: SegmentSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = stage.engine._rank.segments
    check = reader.check
    monkeypatch.setattr(reader, "check", lambda *a: (check(*a), time.sleep(0.6))[0])
    update = await prepare(stage)
    error = await all_refuse(stage, request_of(write(sender, new, lease_s=0.5)), update=update)
    # This rank had written nothing, but others may have.
    assert (error.reason, error.outcome) == (Reason.SEGMENT_EXPIRED, OUTCOME_DIRTY)
    await stage(AbortUpdateRequest(), update=update)
    assert (await all_refuse(stage, ContinueGenerationRequest())).reason is Reason.WEIGHTS_DIRTY


async def test_reading_ends_with_the_calls_time(
    stage: Stage, new: str, sender: SegmentSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = stage.engine._rank.writable
    place = shards.place
    monkeypatch.setattr(shards, "place", lambda *a: (place(*a), time.sleep(0.2)))
    update = await prepare(stage)
    started = time.monotonic()
    error, *_ = await stage.ranks(request_of(write(sender, new)), update=update, within=1.5)
    assert time.monotonic() - started < 1.5
    assert isinstance(error, RlctlError)
    assert (error.reason, error.outcome) == (Reason.CANCELLED, OUTCOME_DIRTY)


async def test_an_abort_breaks_reading_off(
    stage: Stage, new: str, sender: SegmentSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = stage.engine._rank.writable
    place, placed = shards.place, []
    monkeypatch.setattr(shards, "place", lambda *a: (place(*a), placed.append(a[0]), time.sleep(0.1)))
    update = await prepare(stage)
    reading = asyncio.create_task(stage.ranks(request_of(write(sender, new)), update=update))
    await until(lambda: placed)
    await stage.interrupt(update)
    error, *_ = await reading
    assert isinstance(error, RlctlError)
    assert (error.reason, error.outcome) == (Reason.CANCELLED, OUTCOME_DIRTY)
    assert len(placed) < len(tensors_of(new))


@pytest.mark.processes
async def test_a_trainer_killed_in_the_middle_leaves_nothing_and_the_next_one_goes_on(stage: Stage, new: str) -> None:
    first, second = Trainer(0, 2), Trainer(1, 2)
    update = await prepare(stage)
    messages, _ = first.write(new)
    await stage(UpdateWeightsFromTensorRequest(segments=messages), update=update)
    late, _ = second.write(new)
    first.kill()
    second.kill()
    names = {message.shared_memory for message in (*messages, *late)}
    # What the ranks have mapped they give back by themselves; what they never mapped goes with the next sender.
    await until(lambda: stage.engine._rank.segments.mapped == [])
    SegmentSender().close()
    await until(lambda: not held(names))  # the other rank may be at it
    error = await all_refuse(stage, UpdateWeightsFromTensorRequest(segments=late), update=update)
    assert (error.reason, error.outcome) == (Reason.SEGMENT_NOT_FOUND, OUTCOME_REJECTED)
    await stage(AbortUpdateRequest(), update=update)
    assert (await all_refuse(stage, ContinueGenerationRequest())).reason is Reason.WEIGHTS_DIRTY
    third = Trainer()
    messages, digests = third.write(new)
    await take(stage, UpdateWeightsFromTensorRequest(segments=messages))
    assert combine(digests) == digest_of(new)
    await check_serves(stage, new)
    third.kill()
    SegmentSender().close()
