"""The limit on restarts of an engine with repeated failures: beyond the limit, the engine stays failed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

RESTARTS = 20
WITHIN_S = 1800.0


@dataclass(frozen=True)
class RestartLimit:
    """A limit on the restarts of an engine.

    Attributes:
        restarts: restarts after failures; 0: no limit.
        within_s: period of the count, seconds.
    """

    restarts: int = RESTARTS
    within_s: float = WITHIN_S


class Failures(Generic[T]):
    """Failures of an engine within the period of its limit, the earliest first, each with a stamp."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, T]] = deque()

    def add(self, now: float, stamp: T, limit: RestartLimit) -> None:
        """Count a failure at this time, and drop failures before the period."""
        self._recent.append((now, stamp))
        while self._recent[0][0] < now - limit.within_s:
            self._recent.popleft()

    def exceed(self, limit: RestartLimit) -> bool:
        """Return True if no restart remains."""
        return 0 < limit.restarts < len(self._recent)

    def forget(self) -> None:
        """Drop all failures when an operator restarts the engine."""
        self._recent.clear()

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def first(self) -> T:
        """Return the stamp of the earliest failure."""
        return self._recent[0][1]
