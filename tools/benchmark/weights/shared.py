"""tensor, tensor_copy: an update through shared memory, at either end, against memcpy of equal size."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.client.admin import AsyncAdmin
from rlctl.contract.durations import seconds
from rlctl.v1.verbs_pb2 import UpdateWeightsFromTensorRequest
from rlctl.weights.shared_memory.sender import SegmentSender, SentSegment
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.rounds import interleaved, median, ratios
from tools.benchmark.weights import fleets
from tools.benchmark.weights.copies import Memcpy
from tools.benchmark.weights.fleets import Running


@dataclass(frozen=True)
class Sample:
    """A round of one side.

    Attributes:
        written_s: the source copies into segments.
        taken_s: from the RPCs that announce the segments to their answers: every rank has the tensors in place.
        placing_s: part of ``taken_s``: copying at the rank.
        stall_s: from the call until the source's tensors may be overwritten.
        total_s: the whole update.
    """

    written_s: float
    taken_s: float
    placing_s: float = 0.0
    stall_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class Rounds:
    """Results of the rounds.

    Attributes:
        nbytes: size of the weights.
        product: updates.
        memcpy: copies of equal size at the source and at the rank.
    """

    nbytes: int
    product: Sequence[Sample]
    memcpy: Sequence[Sample]


def rounds(setting: Setting) -> Rounds:
    """Measure one engine of one rank beside its trainer. The warm-up makes the segments."""
    fleet = setting.shared(fleets.single)
    nbytes = fleet.source.nbytes
    copy = Memcpy(nbytes)
    publisher = fleet.client.publisher("actor", path="ipc")
    with contextlib.closing(publisher):
        sides = {
            "product": lambda: _update(fleet, publisher),
            "memcpy": lambda: Sample(copy.run(), fleet.peers.memcpy(nbytes)),
        }
        samples = interleaved(setting.rounds, sides, warm_up=2)
    return Rounds(nbytes, **samples)


def _update(fleet: Running, publisher: Any) -> Sample:
    with _timed() as times:
        update = fleet.update(publisher=publisher)
    (rank,) = (rank.weights for stage in update.result.operation.stage_results for rank in stage.rank_results)
    return Sample(times["written"], times["taken"], seconds(rank.load), update.sent_s, update.total_s)


@contextlib.contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Record this process's seconds of writing segments, and of waiting for ranks to receive them."""
    times = {"written": 0.0, "taken": 0.0}
    call, write = AsyncAdmin.call, SegmentSender.write

    async def timed_call(self: AsyncAdmin, request: Any, **settings: Any) -> Any:
        started = time.perf_counter()
        try:
            return await call(self, request, **settings)
        finally:
            if isinstance(request, UpdateWeightsFromTensorRequest):
                times["taken"] += time.perf_counter() - started

    def timed_write(self: SegmentSender, *given: Any, **settings: Any) -> Generator[SentSegment, None, None]:
        for segment in write(self, *given, **settings):
            times["written"] += segment.seconds
            yield segment

    AsyncAdmin.call, SegmentSender.write = timed_call, timed_write  # type: ignore[method-assign]
    try:
        yield times
    finally:
        AsyncAdmin.call, SegmentSender.write = call, write  # type: ignore[method-assign]


def _tensor(setting: Setting) -> Reading:
    measured = setting.once(rounds)
    return Reading.of(
        ratios([sample.taken_s for sample in measured.product], [sample.taken_s for sample in measured.memcpy]),
        floor=median([sample.taken_s for sample in measured.memcpy]) * 1e3,
        floor_unit="ms memcpy",
        taken_ms=median([sample.taken_s for sample in measured.product]) * 1e3,
        placing_ms=median([sample.placing_s for sample in measured.product]) * 1e3,
        update_ms=median([sample.total_s for sample in measured.product]) * 1e3,
        stall_ms=median([sample.stall_s for sample in measured.product]) * 1e3,
        control_ms=median([sample.total_s - sample.written_s - sample.placing_s for sample in measured.product]) * 1e3,
    )


def _tensor_copy(setting: Setting) -> Reading:
    measured = setting.once(rounds)
    return Reading.of(
        ratios([sample.written_s for sample in measured.product], [sample.written_s for sample in measured.memcpy]),
        floor=median([sample.written_s for sample in measured.memcpy]) * 1e3,
        floor_unit="ms memcpy",
        written_ms=median([sample.written_s for sample in measured.product]) * 1e3,
        gb_s=measured.nbytes / median([sample.written_s for sample in measured.product]) / 1e9,
    )


TENSOR = Figure(
    "tensor",
    "shared memory, from the RPC that announces a segment to every tensor in place ÷ memcpy in the same process",
    "ratio",
    _tensor,
    at_most=1.3,
)
TENSOR_COPY = Figure(
    "tensor_copy",
    "shared memory, copying into the segments ÷ memcpy in the same process",
    "ratio",
    _tensor_copy,
    at_most=1.3,
)
