"""A sender's segments: kept from update to update, and never written while somebody may still read them."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from segment_helpers import CPU, parsed
from shared_memory import held
from weights_helpers import Background, digest_of, full_model

from rlctl.contract.errors import Reason, RlctlError
from rlctl.weights.shared_memory import pool as segment_pool
from rlctl.weights.shared_memory import sender as segment_sender
from rlctl.weights.shared_memory.pool import SegmentPool
from rlctl.weights.shared_memory.posix import open_memory
from rlctl.weights.shared_memory.segment import Segment
from rlctl.weights.shared_memory.sender import SegmentSender, SentSegment
from rlctl.weights.tensor.digest import ModelDigest
from rlctl.weights.tensor.placement import SHARED_MEMORY, host_id
from rlctl.weights.tensor.source import as_source
from rlctl.weights.tensor.tensors import TensorMeta, as_bytes


@pytest.fixture
def sender() -> Iterator[SegmentSender]:
    sender = SegmentSender()
    yield sender
    sender.close()


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    pool = SegmentPool(CPU, 2)
    yield pool
    pool.close()


def in_a_while(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def contents(segment: Segment) -> dict[str, torch.Tensor]:
    data = open_memory(segment.header, segment.size, "name", "size").data
    return {
        meta.name: data[at : at + meta.nbytes].view(meta.dtype).reshape(meta.shape).clone()
        for meta, at in segment.tensors
    }


def write(sender: SegmentSender, full: dict[str, torch.Tensor], **settings: object) -> list[SentSegment]:
    source = as_source(full.items())
    return list(sender.write(source, source.metas(), **settings))  # type: ignore[arg-type]


def refusal(job: object) -> RlctlError:
    with pytest.raises(RlctlError) as caught:
        job()  # type: ignore[operator]
    return caught.value


def test_what_is_written_is_what_is_described_and_digested(sender: SegmentSender) -> None:
    full, digest = full_model(), ModelDigest()
    (sent,) = write(sender, full, digest=digest)
    (segment,) = parsed(sent.messages)
    found = contents(segment)
    assert list(found) == list(full), "in the source's order"
    assert all(torch.equal(as_bytes(found[name]), as_bytes(full[name])) for name in full)
    assert digest.digest() == digest_of(full)
    assert (segment.node, segment.device, segment.generation) == (host_id(), "cpu", 1)
    assert sent.nbytes == sum(tensor.nbytes for tensor in full.values())


def test_tensors_are_cast_to_the_wire_from_any_layout(sender: SegmentSender) -> None:
    given = torch.randn(6, 4).t()
    source = as_source([("w", given)])
    digest = ModelDigest()
    (sent,) = sender.write(source, [TensorMeta("w", torch.bfloat16, (4, 6))], digest=digest)
    found = contents(*parsed(sent.messages))
    assert torch.equal(found["w"], given.bfloat16())
    assert digest.digest() == digest_of({"w": given.bfloat16()})


def test_from_the_second_update_on_nothing_is_allocated(sender: SegmentSender) -> None:
    seen = []
    for update in range(1, 6):
        (sent,) = write(sender, full_model(update))
        (segment,) = parsed(sent.messages)
        assert digest_of(contents(segment)) == digest_of(full_model(update))
        assert segment.generation == update
        seen.append((segment.header, sender.pool.allocations, sender.pool.nbytes))
        sent.release()
    assert len(set(seen)) == 1
    assert seen[0][1] == 1


def test_a_model_larger_than_a_segment_comes_in_several_and_none_is_overwritten() -> None:
    full = {f"w{n}": torch.full((1000,), n, dtype=torch.uint8) for n in range(10)}
    full["w4"] = torch.full((5000,), 4, dtype=torch.uint8)
    sender = SegmentSender(segment_bytes=2500, segments=2)
    source, digest = as_source(full.items()), ModelDigest()
    names, got = set(), {}
    writing = sender.write(source, source.metas(), digest=digest)
    lent: list[SentSegment] = []
    for sent in writing:
        lent.append(sent)
        names |= {segment.header for segment in parsed(sent.messages)}
        assert len(held(names)) <= 2
        for kept in lent:
            got.update(contents(*parsed(kept.messages)))
        if len(lent) == 2:
            lent.pop(0).release()
    assert digest_of(got) == digest_of(full) == digest.digest()
    assert sender.pool.nbytes >= 5000
    sender.close()
    assert held(names) == set()


@pytest.mark.parametrize(
    ("room", "most"), [(1 << 40, 10_000), (40_000, 8192), (39_000, 8192), (33_000, 8192), (30_000, 4096), (0, 1000)]
)
def test_segments_are_a_part_of_the_room_that_there_is(
    monkeypatch: pytest.MonkeyPatch, sender: SegmentSender, room: int, most: int
) -> None:
    """A power of two, or the largest tensor."""
    monkeypatch.setattr(segment_sender, "free_bytes", lambda: room - sender.pool.nbytes)
    full = {f"w{n}": torch.full((1000,), n, dtype=torch.uint8) for n in range(10)}
    for _ in range(2):
        source = as_source(full.items())
        sizes = []
        for sent in sender.write(source, source.metas()):
            sizes.append(sent.nbytes)
            sent.release()
        assert sum(sizes) == 10_000
        assert max(sizes) == min(most // 1000 * 1000, 10_000)
    assert sender.pool.allocations == 1 if most == 10_000 else 2, "what it holds itself counts as room"


def test_a_second_segment_that_finds_no_room_waits_for_the_first(
    monkeypatch: pytest.MonkeyPatch, pool: SegmentPool
) -> None:
    first, allocate = pool.take(100, in_a_while()), os.posix_fallocate

    def full(descriptor: int, start: int, size: int) -> None:
        if pool.nbytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    pool.lend(first, "reader", 1000)
    assert refusal(lambda: pool.take(100, time.monotonic())).reason is Reason.DEADLINE_EXCEEDED
    waiting = Background(lambda: pool.take(100_000, in_a_while()))
    pool.give_back(first, "reader")
    larger = waiting.result()
    assert larger is not first, "which was too small, and made room"
    assert larger.data.numel() >= 100_000


def test_a_segment_is_written_again_only_when_it_is_digested() -> None:
    class Slow(ModelDigest):
        def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
            time.sleep(0.02)
            super().add(name, tensor, dtype)

    full = {f"w{n}": torch.full((1000,), n, dtype=torch.uint8) for n in range(6)}
    sender, digest = SegmentSender(segment_bytes=1000, segments=1), Slow()
    source = as_source(full.items())
    for sent in sender.write(source, source.metas(), digest=digest):
        sent.release()
    assert digest.digest() == digest_of(full)
    sender.close()


def test_a_segment_is_written_again_only_after_its_release(pool: SegmentPool) -> None:
    first, second = pool.take(100, in_a_while()), pool.take(100, in_a_while())
    assert first is not second
    pool.lend(first, "reader", 1000)
    pool.lend(second, "reader", 1000)
    assert refusal(lambda: pool.take(100, time.monotonic())).reason is Reason.DEADLINE_EXCEEDED
    waiting = Background(lambda: pool.take(100, in_a_while()))
    assert first.header.generation == 1
    pool.give_back(second, "somebody else")
    pool.give_back(second, "reader")
    assert waiting.result() is second
    assert second.header.generation == 0, "whoever still reads it can tell"
    pool.give_back(second)
    assert pool.take(100, in_a_while()) is second
    assert pool.allocations == 2


def test_without_a_release_the_lease_is_waited_for_and_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_pool, "LEASE_MARGIN_S", 0.2)
    pool = SegmentPool(CPU, 1)
    memory = pool.take(100, in_a_while())
    pool.lend(memory, "reader", 0.1)
    started = time.monotonic()
    assert pool.take(100, in_a_while()) is memory
    assert 0.29 <= time.monotonic() - started < 2
    pool.close()


def test_every_borrower_must_have_given_it_back(pool: SegmentPool) -> None:
    memory = pool.take(100, in_a_while())
    pool.lend(memory, "a", 1000)
    pool.lend(memory, "b", 1000)
    pool.give_back(memory, "a")
    other = pool.take(100, in_a_while())
    assert other is not memory
    pool.give_back(memory, "b")
    assert pool.take(100, in_a_while()) is memory


def test_segments_that_have_become_too_small_are_replaced(pool: SegmentPool) -> None:
    small = [pool.take(100, in_a_while()) for _ in range(2)]
    for memory in small:
        pool.give_back(memory)
    large = pool.take(1 << 20, in_a_while())
    assert large.data.numel() >= 1 << 20
    names = [memory.header.name for memory in (*small, large)]
    assert sum((SHARED_MEMORY / name).exists() for name in names) == 2
    assert pool.take(100, in_a_while()) in small
    assert pool.allocations == 3


def test_closing_wakes_whoever_waits(pool: SegmentPool) -> None:
    for _ in range(2):
        pool.take(100, in_a_while())
    waiting = Background(lambda: refusal(lambda: pool.take(100, in_a_while(60))))
    pool.close()
    assert waiting.result().reason is Reason.CANCELLED


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_what_a_cast_would_ruin_is_refused(sender: SegmentSender, dtype: torch.dtype) -> None:
    source = as_source([("a", torch.ones(3).to(dtype))])
    error = refusal(lambda: list(sender.write(source, [TensorMeta("a", torch.float32, (3,))])))
    assert f"a is {dtype}, and torch.float32 was announced" in error.message


@pytest.mark.parametrize("yields", [["a", "b"], ["a", "b", "c", "d"], ["a", "c", "b"], ["a", "b", "x"]])
def test_a_source_that_is_not_what_was_announced_is_refused(sender: SegmentSender, yields: list[str]) -> None:
    source = as_source([(name, torch.ones(3)) for name in yields])
    wire = [TensorMeta(name, torch.float32, (3,)) for name in "abc"]
    error = refusal(lambda: list(sender.write(source, wire)))
    assert (error.reason, error.field) == (Reason.FIELD_INVALID, "weights")


def test_another_shape_is_refused_and_the_segment_is_free_again(sender: SegmentSender) -> None:
    source = as_source([("a", torch.ones(3))])
    assert refusal(lambda: list(sender.write(source, [TensorMeta("a", torch.float32, (4,))]))).field == "weights"
    for _ in range(3):
        (sent,) = write(sender, {"a": torch.ones(4)})
        sent.release()
    assert sender.pool.allocations == 1


def test_what_the_source_raises_passes_through_and_frees_the_segment(sender: SegmentSender) -> None:
    class Failing:
        def metas(self) -> list[TensorMeta]:
            return [TensorMeta(name, torch.float32, (3,)) for name in "ab"]

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.ones(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        list(sender.write(Failing(), Failing().metas()))
    assert threading.active_count() == 1 or all(t.name != "digest_0" for t in threading.enumerate())
    (sent,) = write(sender, {"a": torch.ones(3)})
    assert sender.pool.allocations == 1
    sender.close()
    assert held([sent.messages[0].shared_memory]) == set(), f"the traceback keeps it: {caught.value!r}"


def test_ranks_of_every_device_read_the_same_host_memory(sender: SegmentSender) -> None:
    messages = write(sender, {"a": torch.ones(3)}, devices=["cpu", "GPU-1"])[0].messages
    assert [m.device for m in messages] == ["cpu", "GPU-1"]
    assert len({m.shared_memory for m in messages}) == 1


def test_the_source_is_free_once_the_last_segment_is_taken_whether_or_not_it_is_read() -> None:
    full = full_model()
    source, left = as_source(full.items()), threading.Event()
    sender = SegmentSender(segment_bytes=max(tensor.nbytes for tensor in full.values()), segments=64)
    segments = sender.write(source, source.metas(), on_all_read=left.set, digest=ModelDigest())
    taken: list[SentSegment] = []
    for segment in segments:
        assert not left.is_set()
        taken.append(segment)
    assert left.is_set()
    assert len(taken) > 2
    sender.close()
