"""A trainer's rank goes through its weights: to the end, one pass after the other, and where its segments lie."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from rlctl.contract.errors import Reason, RlctlError
from rlctl.trainer import source_rank as parts
from rlctl.trainer.pending_update import UpdateState
from rlctl.trainer.source_rank import Part
from rlctl.trainer.update_progress import ByteCount
from rlctl.trainer.weights_pass import in_thread
from rlctl.v1.trainer_pb2 import Attempt
from rlctl.v1.verbs_pb2 import TensorSegment
from rlctl.weights.shared_memory.sender import SegmentSender
from rlctl.weights.tensor.buckets import Bucket, to_proto
from rlctl.weights.tensor.placement import SHARED_MEMORY
from rlctl.weights.tensor.tensors import TensorMeta

TENSORS = 10


class Gathered:
    """Weights of which every tensor takes another rank: it must ask for the same one at the same time."""

    def __init__(self) -> None:
        self.gathers = threading.Barrier(2)
        self.given: list[int] = []

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(str(number), torch.float32, (1,)) for number in range(TENSORS)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(TENSORS):
            self.gathers.wait(10)
            self.given.append(number)
            yield str(number), torch.zeros(1)


async def nothing(segments: Sequence[TensorSegment]) -> None:
    del segments


def gather_along(weights: Gathered, count: int) -> None:
    """The other rank's side of so many gathers."""
    for _ in range(count):
        weights.gathers.wait(10)


@pytest.mark.parametrize("raised", [StopIteration, SystemExit])
async def test_whatever_is_raised_ends_the_wait_for_it(raised: type[BaseException]) -> None:
    def fail() -> None:
        raise raised("in the thread")

    work, ended = in_thread(fail, lambda: None, "a thread")
    async with asyncio.timeout(5.0):
        with pytest.raises(RlctlError, match="in the thread") as caught:
            await work
        await ended
    assert caught.value.reason is Reason.SOURCE_FAILED


async def half_way(part: Part, weights: Gathered) -> asyncio.Task[object]:
    attempt = asyncio.create_task(part.attempt(weights, Attempt(), nothing, UpdateState()))
    await asyncio.to_thread(gather_along, weights, TENSORS // 2)
    return attempt


async def test_a_pass_that_is_stopped_goes_on_to_its_end_and_the_next_one_begins_after_it() -> None:
    weights = Gathered()
    part = Part("127.0.0.1", None, alone=False)
    stopped = await half_way(part, weights)
    stopped.cancel()
    again = asyncio.create_task(part.attempt(weights, Attempt(), nothing, UpdateState()))
    # The other rank's pass did not fail: it goes to its end, and then a second time through all.
    await asyncio.to_thread(gather_along, weights, TENSORS - TENSORS // 2)
    await asyncio.to_thread(gather_along, weights, TENSORS)
    await again
    assert weights.given == [*range(TENSORS), *range(TENSORS)]
    with pytest.raises(asyncio.CancelledError):
        await stopped


async def test_the_only_rank_of_its_trainer_stops_at_once() -> None:
    weights = Gathered()
    part = Part("127.0.0.1", None)
    stopped = await half_way(part, weights)
    stopped.cancel()
    while not await part.settle(0.05):
        await asyncio.to_thread(gather_along, weights, 1)
    assert len(weights.given) < TENSORS
    with pytest.raises(asyncio.CancelledError):
        await stopped


async def test_a_pass_in_which_nothing_comes_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STOP_S", 0.1)
    monkeypatch.setattr(parts, "HANGS_S", 0.1)
    weights = Gathered()
    part = Part("127.0.0.1", None, alone=False)
    stopped = await half_way(part, weights)
    stopped.cancel()
    with pytest.raises(RlctlError, match="hang") as caught:
        await part.attempt(weights, Attempt(), nothing, UpdateState())
    assert caught.value.reason is Reason.ILLEGAL_STATE
    weights.gathers.abort()
    assert await part.settle(5)


class Given:
    """Says that it has "a" and "b", and gives what it was given."""

    def __init__(self, *pairs: tuple[str, torch.Tensor]) -> None:
        self._pairs = pairs

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(name, torch.float32, (2,)) for name in "ab"]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._pairs


A, B = ("a", torch.ones(2)), ("b", torch.ones(2))


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ([A], "lacks 1 of the announced tensors: b"),
        ([A, A], "'a', which was not announced, or yields it twice"),
        ([A, B, ("c", torch.ones(2))], "'c', which was not announced"),
        ([A, ("b", torch.ones(3))], "b has shape (3,)"),
        ([A, ("b", torch.ones(2, dtype=torch.int64))], "b is torch.int64"),
    ],
)
async def test_a_pass_that_only_digests_is_of_what_was_announced(
    pairs: list[tuple[str, torch.Tensor]], named: str
) -> None:
    part = Part("127.0.0.1", 0)
    listed = Attempt(buckets=[to_proto(Bucket(0, Given().metas(), True))])
    with pytest.raises(RlctlError) as caught:
        await part.attempt(Given(*pairs), listed, nothing, UpdateState())
    assert caught.value.reason is Reason.FIELD_INVALID
    assert named in caught.value.message
    sent = await part.attempt(Given(B, A), listed, nothing, UpdateState())
    assert [tensor.name for tensor in sent.digests] == ["b", "a"]


def test_segments_lie_on_a_gpu_where_that_is_every_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(parts, "device_id", lambda device: f"GPU-{device.index}")
    for readers, place in (
        (["GPU-3"], "cuda:3"),
        (["GPU-3", "GPU-4"], "cpu"),
        (["GPU-4"], "cpu"),
        (["cpu"], "cpu"),
        ([], "cpu"),
    ):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert parts._meeting_place(readers) == torch.device(place)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert parts._meeting_place(readers) == torch.device("cpu")


@pytest.mark.parametrize(("failed", "lost"), [("GROUP_FAILED", True), ("FIELD_INVALID", False)])
async def test_a_group_that_broke_because_a_trainer_rank_is_gone_says_so(failed: str, lost: bool) -> None:
    """The engines leave all groups when one source is gone: another one may see that first."""
    others: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    raised = asyncio.create_task(parts.explained(Reason[failed].error("it failed"), others))
    await asyncio.sleep(0)
    others.set_exception(Reason.TRAINER_RANK_LOST.error("trainer rank 2 is gone"))
    error = await raised
    assert isinstance(error, RlctlError)
    assert error.reason.name == ("TRAINER_RANK_LOST" if lost else failed)
    assert others.exception() is not None


async def test_an_error_after_the_work_ends_the_thread_for_its_waiters(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise every later update is refused: the earlier pass seems to hang."""

    def fails() -> None:
        raise RuntimeError("the device is gone")

    work, ended = in_thread(lambda: 7, fails, "a pass")
    assert await asyncio.wait_for(work, 5) == 7
    await asyncio.wait_for(ended, 5)
    assert "the device is gone" in caplog.text


class Breaking(Gathered):
    """Weights that fail after two segments."""

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(str(number), torch.float32, (1024,)) for number in range(3)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "0", torch.zeros(1024)
        yield "1", torch.zeros(1024)
        raise KeyError("2")


def test_a_source_that_fails_while_ranks_read_says_why_and_they_read_to_the_end() -> None:
    weights, part = Breaking(), Part("127.0.0.1", 0)
    part._segments = SegmentSender(segment_bytes=4096)
    read: list[bool] = []

    def ship(segments: Sequence[TensorSegment]) -> None:
        time.sleep(0.2)
        read.extend((SHARED_MEMORY / segment.shared_memory).exists() for segment in segments)

    dtypes = {meta.name: meta.dtype for meta in weights.metas()}
    attempt = Attempt()
    attempt.timeout.FromSeconds(10)
    with pytest.raises(KeyError, match="2"):
        part._share(weights, dtypes, attempt, None, ship, lambda: None, ByteCount())
    assert read == [True, True]
