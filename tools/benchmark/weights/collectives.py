"""Times of a process inside broadcasts, and times of copying received tensors into place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rlctl.weights.group.process_group import WeightGroup
from rlctl.weights.shards.shard_map import ShardMap

Span = tuple[float, float]
"""Start and end in seconds, on a clock common to all processes of a machine."""


class Watch:
    """Spans inside :meth:`WeightGroup.broadcast` and :meth:`ShardMap.place` of this process, from now on."""

    def __init__(self) -> None:
        self.broadcasts: list[Span] = []
        self.copies: list[Span] = []
        self._former = (WeightGroup.broadcast, ShardMap.place)
        WeightGroup.broadcast = _watched(self._former[0], self.broadcasts)  # type: ignore[method-assign]
        ShardMap.place = _watched(self._former[1], self.copies)  # type: ignore[method-assign]

    def end(self) -> None:
        """Stop recording."""
        WeightGroup.broadcast, ShardMap.place = self._former  # type: ignore[method-assign]


@contextlib.contextmanager
def timed() -> Iterator[list[Span]]:
    """Record this process's broadcasts inside the block."""
    watch = Watch()
    try:
        yield watch.broadcasts
    finally:
        watch.end()


def busy_s(sending: Sequence[Span], ranks: Sequence[tuple[Sequence[Span], Sequence[Span]]]) -> float:
    """Return the seconds in which a collective ran or a rank copied into place.

    ``sending``: the source's broadcasts; ``ranks``: each rank's spans of the same broadcasts, and its copies. A
    broadcast begins when the source and a first rank have entered, since no byte moves before, and ends when the last
    process has left.
    """
    busy = [tuple(span) for _, copied in ranks for span in copied]
    for (start, end), *taken in zip(sending, *(received for received, _ in ranks), strict=True):
        busy.append((max(start, min(s for s, _ in taken)), max(end, *(e for _, e in taken))))
    total, reached = 0.0, float("-inf")
    for start, end in sorted(busy):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _watched(method: Any, spans: list[Span]) -> Any:
    def call(*given: Any, **settings: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*given, **settings)
        finally:
            spans.append((started, time.perf_counter()))

    return call
