"""The limit on restarts of an engine that fails again and again: beyond it, the engine is left failed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

RESTARTS = 20
WITHIN_S = 1800.0


@dataclass(frozen=True)
class RestartLimit:
    """How often an engine may be started again.

    Attributes:
        restarts: restarts after failures; 0: no limit.
        within_s: the time in which they count, seconds.
    """

    restarts: int = RESTARTS
    within_s: float = WITHIN_S


class Failures(Generic[T]):
    """Failures of one engine within the time of its limit, the earliest first, with a stamp each."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, T]] = deque()

    def add(self, now: float, stamp: T, limit: RestartLimit) -> None:
        """Count a failure at this time, and forget failures before the period."""
        self._recent.append((now, stamp))
        while self._recent[0][0] < now - limit.within_s:
            self._recent.popleft()

    def exceed(self, limit: RestartLimit) -> bool:
        """Whether the engine has been started again as often as it may be."""
        return 0 < limit.restarts < len(self._recent)

    def forget(self) -> None:
        """An operator wants it started again."""
        self._recent.clear()

    def __len__(self) -> int:
        """How many there were."""
        return len(self._recent)

    @property
    def first(self) -> T:
        """Stamp of the earliest."""
        return self._recent[0][1]
