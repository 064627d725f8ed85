"""How long this process, the source, has been inside broadcasts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from rlctl.weights.groups import WeightGroup


class Stopwatch:
    """Seconds inside :meth:`WeightGroup.broadcast`, of all groups of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0


@contextlib.contextmanager
def timed() -> Iterator[Stopwatch]:
    """Time the broadcasts inside the block."""
    watch = Stopwatch()
    broadcast = WeightGroup.broadcast

    def measured(self: WeightGroup, tensor: torch.Tensor, src: int = 0) -> None:
        started = time.perf_counter()
        try:
            broadcast(self, tensor, src)
        finally:
            watch.seconds += time.perf_counter() - started

    WeightGroup.broadcast = measured  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        WeightGroup.broadcast = broadcast  # type: ignore[method-assign]
