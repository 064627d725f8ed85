"""Reading segments: nothing is begun that cannot be finished, and nothing counts that was not read under its lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from segment_helpers import CPU, parsed, soon
from weights_helpers import digest_of, full_model, tp_map

from rlctl.contract.durations import duration
from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_DIRTY, OUTCOME_REJECTED
from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl.weights.receiver import Receiver
from rlctl.weights.shards.shard_map import LocalExchange, ShardMap, model_digest
from rlctl.weights.shared_memory import reader
from rlctl.weights.shared_memory.reader import Reading, SegmentReader
from rlctl.weights.shared_memory.sender import SegmentSender, SentSegment
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.placement import SHARED_MEMORY
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import as_bytes

FULL = full_model()


class Rank:
    """A receiver of the model."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.shards: ShardMap = tp_map(FULL, rank, size)
        self.receiver = Receiver(self.shards)
        self.reader = SegmentReader(CPU)
        self.receiver.begin("update")

    def check(self, messages: list[TensorSegment]) -> Reading:
        return self.reader.check(parsed(messages), self.receiver)

    def take(self, messages: list[TensorSegment]) -> None:
        self.reader.read(self.check(messages), self.receiver)

    @property
    def untouched(self) -> bool:
        return all(not as_bytes(shard.local).any() for shard in self.shards.shards.values())


@pytest.fixture
def sender() -> Iterator[SegmentSender]:
    sender = SegmentSender()
    yield sender
    sender.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.reader.close()


def write(sender: SegmentSender, full: dict[str, torch.Tensor] = FULL, **settings: object) -> SentSegment:
    source = as_source(full.items())
    (sent,) = sender.write(source, source.metas(), **settings)  # type: ignore[arg-type]
    return sent


def refusal(job: Callable[[], object]) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        job()
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_takes_its_slices(sender: SegmentSender, size: int) -> None:
    digest = ModelDigest()
    messages = write(sender, digest=digest).messages
    for number in range(size):
        rank, expected = Rank(number, size), tp_map(FULL, number, size)
        rank.take(messages)
        assert rank.receiver.missing() == []
        for name, shard in expected.shards.items():
            expected.place(name, FULL[name])
            assert torch.equal(as_bytes(rank.shards.shards[name].local), as_bytes(shard.local)), name
        if size == 1:
            assert model_digest(rank.shards, LocalExchange()).digest == digest.digest()
        rank.reader.close()


def test_two_sources_feed_a_rank_in_one_go(sender: SegmentSender, rank: Rank) -> None:
    other = SegmentSender()
    names = sorted(FULL)
    messages = [
        *write(sender, {name: FULL[name] for name in names[:4]}).messages,
        *write(other, {name: FULL[name] for name in names[4:]}).messages,
    ]
    rank.take(messages)
    assert rank.receiver.missing() == []
    assert model_digest(rank.shards, LocalExchange()).digest == digest_of(FULL)
    other.close()


def test_a_segment_is_mapped_once(sender: SegmentSender, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    open_memory = reader.open_memory
    monkeypatch.setattr(reader, "open_memory", lambda *a: opened.append(a[0]) or open_memory(*a))
    for update in range(4):
        rank.receiver.begin(f"update-{update}")
        sent = write(sender, full_model(update))
        rank.take(sent.messages)
        sent.release()
        assert model_digest(rank.shards, LocalExchange()).digest == digest_of(full_model(update))
    assert rank.reader.mapped == opened
    assert len(opened) == 1


def test_nothing_is_read_after_the_lease(sender: SegmentSender, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = write(sender).messages
    messages[0].lease.CopyFrom(duration(0.05))
    segments = parsed(messages)
    time.sleep(0.06)
    error = refusal(lambda: rank.reader.check(segments, rank.receiver))
    assert (error.reason, error.outcome) == (Reason.SEGMENT_EXPIRED, OUTCOME_REJECTED)
    # Checked in time, and then it runs out between two tensors.
    messages[0].lease.CopyFrom(duration(1000))
    place, placed = rank.shards.place, []

    def slowly(name: str, full: torch.Tensor) -> None:
        place(name, full)
        placed.append(name)
        if len(placed) == 3:
            monkeypatch.setattr(reader.time, "monotonic", lambda: time.perf_counter() + 1e9)

    monkeypatch.setattr(rank.shards, "place", slowly)
    reading = rank.check(messages)
    error = refusal(lambda: rank.reader.read(reading, rank.receiver))
    assert (error.reason, error.outcome) == (Reason.SEGMENT_EXPIRED, OUTCOME_DIRTY)
    assert len(placed) == 3
    assert rank.receiver.missing() == sorted(FULL), "none of it counts as written"


def test_memory_that_is_used_again_meanwhile_is_noticed(
    sender: SegmentSender, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = write(sender)
    place, placed = rank.shards.place, []

    def slowly(name: str, full: torch.Tensor) -> None:
        place(name, full)
        placed.append(name)
        if len(placed) == len(FULL):
            sent.release()
            write(sender, full_model(1)).release()

    monkeypatch.setattr(rank.shards, "place", slowly)
    error = refusal(lambda: rank.take(sent.messages))
    assert (error.reason, error.outcome) == (Reason.SEGMENT_EXPIRED, OUTCOME_DIRTY)
    assert rank.receiver.missing() == sorted(FULL)
    monkeypatch.undo()
    error = refusal(lambda: rank.check(sent.messages))
    assert (error.reason, error.outcome) == (Reason.SEGMENT_EXPIRED, OUTCOME_REJECTED)


def test_an_interrupt_ends_it(sender: SegmentSender, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = write(sender).messages
    rank.take(messages)
    assert rank.receiver.missing() == []
    reading = rank.check(messages)
    place = rank.shards.place
    monkeypatch.setattr(rank.shards, "place", lambda *a: (place(*a), rank.receiver.interrupt("update")))
    error = refusal(lambda: rank.reader.read(reading, rank.receiver))
    assert (error.reason, error.outcome) == (Reason.CANCELLED, OUTCOME_DIRTY)
    assert rank.receiver.missing() == sorted(FULL), "what was written before is a mixture now"
    monkeypatch.undo()
    error = refusal(lambda: rank.reader.read(reading, rank.receiver))
    assert (error.reason, error.outcome) == (Reason.CANCELLED, OUTCOME_REJECTED)
    rank.receiver.begin("another")
    rank.reader.read(reading, rank.receiver)
    assert rank.receiver.missing() == []


def test_what_does_not_fit_is_refused_before_the_first_byte(sender: SegmentSender, rank: Rank) -> None:
    (good,) = write(sender).messages
    (vanished,) = write(other := SegmentSender()).messages
    other.close()

    def changed(change: Callable[[TensorSegment], object]) -> TensorSegment:
        message = TensorSegment.FromString(good.SerializeToString())
        change(message)
        return message

    (truncated,) = write(third := SegmentSender()).messages
    path = SHARED_MEMORY / truncated.shared_memory
    with path.open("r+b") as file:
        file.truncate(truncated.size - 4096)
    for message, reason, field in (
        (vanished, Reason.SEGMENT_NOT_FOUND, "segments[0].shared_memory"),
        (truncated, Reason.FIELD_INVALID, "segments[0].size"),
        (changed(lambda m: setattr(m, "size", m.size + 4096)), Reason.FIELD_INVALID, "segments[0].size"),
        (changed(lambda m: setattr(m, "node", "elsewhere")), Reason.NOT_COLOCATED, "segments"),
        (changed(lambda m: setattr(m, "device", "GPU-1")), Reason.NOT_COLOCATED, "segments"),
        (changed(lambda m: setattr(m, "generation", 7)), Reason.SEGMENT_EXPIRED, "segments[0]"),
        (changed(lambda m: setattr(m.tensors[1], "name", "x")), Reason.FIELD_INVALID, "segments[0].tensors[1].name"),
        (
            changed(lambda m: m.tensors[1].shape.dims.append(1)),
            Reason.FIELD_INVALID,
            "segments[0].tensors[1].shape",
        ),
        (
            changed(lambda m: setattr(m.tensors[1], "dtype", "torch.int16")),
            Reason.FIELD_INVALID,
            "segments[0].tensors[1].dtype",
        ),
    ):
        error = refusal(lambda message=message: rank.check([message]))
        assert (error.reason, error.field, error.outcome) == (reason, field, OUTCOME_REJECTED)
    (cuda,) = [TensorSegment.FromString(good.SerializeToString())]
    cuda.cuda_ipc, cuda.header_memory = bytes(64), good.shared_memory
    assert refusal(lambda: rank.check([cuda])).outcome == OUTCOME_REJECTED
    assert rank.untouched
    third.close()
    rank.take([good])
    assert rank.receiver.missing() == []


def test_memory_goes_back_when_the_sender_ends(
    sender: SegmentSender, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "WATCH_S", 0.02)
    rank.take(write(sender).messages)
    names = rank.reader.mapped
    assert len(names) == 1
    sender.close()
    assert soon(lambda: rank.reader.mapped == [])
    assert soon(lambda: rank.reader._watch is None), "nothing is looked after any more"
    # A new sender's segments are looked after again.
    again = SegmentSender()
    rank.take(write(again).messages)
    again.close()
    assert soon(lambda: rank.reader.mapped == [])
    assert (SHARED_MEMORY / names[0]).exists() is False


def test_a_closed_reader_maps_nothing(sender: SegmentSender, rank: Rank) -> None:
    messages = write(sender).messages
    rank.take(messages)
    rank.reader.close()
    assert rank.reader.mapped == []
    assert refusal(lambda: rank.check(messages)).reason is Reason.CANCELLED
    assert (SHARED_MEMORY / messages[0].shared_memory).exists()
