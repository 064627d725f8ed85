"""When a process was inside broadcasts, and when it copied what it had received into place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rlctl.weights.groups import WeightGroup
from rlctl.weights.shards import ShardMap

Span = tuple[float, float]
"""Start and end on the clock that all processes of a machine share, seconds."""


class Watch:
    """Spans inside :meth:`WeightGroup.broadcast` and :meth:`ShardMap.place` of this process, from now on."""

    def __init__(self) -> None:
        self.broadcasts: list[Span] = []
        self.copies: list[Span] = []
        self._former = (WeightGroup.broadcast, ShardMap.place)
        WeightGroup.broadcast = _watched(self._former[0], self.broadcasts)  # type: ignore[method-assign]
        ShardMap.place = _watched(self._former[1], self.copies)  # type: ignore[method-assign]

    def end(self) -> None:
        """No more."""
        WeightGroup.broadcast, ShardMap.place = self._former  # type: ignore[method-assign]


@contextlib.contextmanager
def timed() -> Iterator[list[Span]]:
    """This process's broadcasts inside the block."""
    watch = Watch()
    try:
        yield watch.broadcasts
    finally:
        watch.end()


def busy_s(sending: Sequence[Span], rank: tuple[Sequence[Span], Sequence[Span]]) -> float:
    """Seconds in which a rank and the source were inside a broadcast together, or the rank copied into place.

    ``rank``: the spans of its broadcasts and of its copies. While only one side is inside a broadcast no byte moves:
    it waits for the other one.
    """
    received, copied = rank
    together = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(sending, received, strict=True)]
    total, reached = 0.0, float("-inf")
    for start, end in sorted([span for span in together if span[0] < span[1]] + [tuple(span) for span in copied]):
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
