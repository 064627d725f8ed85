"""Waits after refusals and failures of stages.

A stage that refuses is changing its state, and the watched fleet does not show this yet. A stage that fails is likely
to fail the next request. In both cases requests avoid the stage for a time that doubles with each try. After each wait,
one request tries the stage, until a request is accepted. So waiting requests do not arrive all at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from rlctl.contract.errors import RlctlError

REFUSED_S = (0.02, 0.5)
"""First and longest wait after a refusal, in seconds."""

FAILED_S = (0.1, 10.0)
"""First and longest wait after a failure, in seconds."""


@dataclass
class _Held:
    incarnation: int
    revision: int | None  # None: until a restart, for any report
    since: float
    pause_s: float
    until: float
    error: RlctlError

    def is_of(self, incarnation: int, revision: int) -> bool:
        return self.incarnation == incarnation and self.revision in (None, revision)


class Health:
    """Recent refusals and failures of each stage."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        """``jitter`` returns numbers in [0, 1), so that clients of a fleet do not return at the same moment."""
        self._held: dict[str, _Held] = {}
        self._jitter = jitter

    def usable(self, slot: str, incarnation: int, revision: int, now: float) -> bool:
        """Return whether a request may go to the slot. A restart ends every wait; a new report ends a wait after a
        refusal.
        """
        wait = self._held.get(slot)
        if wait is not None and not wait.is_of(incarnation, revision):
            del self._held[slot]
            wait = None
        return wait is None or now >= wait.until

    def trying(self, slot: str, now: float) -> None:
        """Record that a request goes to the slot. A slot under a wait gets its next request after a further wait."""
        if slot in self._held:
            self._held[slot].until = now + self._held[slot].pause_s

    def answered(self, slot: str) -> None:
        """Record that the stage accepted a request."""
        self._held.pop(slot, None)

    def refused(self, slot: str, incarnation: int, revision: int, sent: float, now: float, error: RlctlError) -> None:
        """Record a refusal due to the stage's state. ``sent`` is the time of the request."""
        self._hold(slot, incarnation, revision, sent, now, REFUSED_S, error)

    def failed(self, slot: str, incarnation: int, sent: float, now: float, error: RlctlError) -> None:
        """Record a failure of the stage or its connection. ``sent`` is the time of the request."""
        self._hold(slot, incarnation, None, sent, now, FAILED_S, error)

    def last_error(self, slot: str, incarnation: int, revision: int) -> RlctlError | None:
        """Return the latest refusal or failure of the stage, or None if the stage accepted a request since."""
        wait = self._held.get(slot)
        return wait.error if wait is not None and wait.is_of(incarnation, revision) else None

    def again_s(self, now: float) -> float:
        """Return the seconds until the next wait of a stage ends; infinite if no stage is under a wait."""
        waits = (wait.until - now for wait in self._held.values() if wait.until > now)
        return min(waits, default=float("inf"))

    def _hold(
        self,
        slot: str,
        incarnation: int,
        revision: int | None,
        sent: float,
        now: float,
        bounds: tuple[float, float],
        error: RlctlError,
    ) -> None:
        first, most = bounds
        previous = self._held.get(slot)
        if previous is None or (previous.incarnation, previous.revision) != (incarnation, revision):
            pause_s = first
        elif sent < previous.since:
            return  # sent before the wait began: many requests may meet the same event
        else:
            pause_s = min(2 * previous.pause_s, most)
        self._held[slot] = _Held(incarnation, revision, now, pause_s, now + pause_s * (1 + self._jitter() / 4), error)
