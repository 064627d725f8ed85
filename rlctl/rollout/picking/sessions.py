"""Where sessions are at home: on a hash ring, no stage with many more of them than another.

A plain ring gives one stage of a few half as many sessions again as its share, whose KV entries then drive each other
out. So a stage takes sessions up to a bound above the mean only, and further ones go on to the next on the ring.
Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018. What is bounded are
sessions that live, not requests that run: the entries of a session lie in the cache between its turns, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlctl.contract.errors import Reason
from rlctl.rollout.picking.hash_ring import Ring

BOUND = 1.25
"""A stage's most sessions, as a multiple of the mean."""


@dataclass
class _Home:
    slot: str
    ring: Ring
    used: float


class Sessions:
    """Homes of the sessions that live: from their first request until they finish or were idle for ``idle_s``."""

    def __init__(self, idle_s: float) -> None:
        if not idle_s > 0:
            raise Reason.FIELD_INVALID.error(f"session_idle_s is {idle_s}; it must be above 0", field="session_idle_s")
        self._idle_s = idle_s
        self._homes: dict[str, _Home] = {}  # the one that was used last comes last
        self._ring = Ring(())
        self.count: Counter[str] = Counter()
        """Sessions by slot."""

    def home(self, session: str) -> str:
        """Where a session lives, or ""."""
        return self._homes[session].slot if session in self._homes else ""

    def pick(self, session: str, candidates: Sequence[str], members: Collection[str], now: float) -> str:
        """The session's home if it is a candidate, else the first candidate after it on the ring.

        ``members`` are all that may be a home. Who joins them takes over its share of the sessions, each with its next
        request; one that is a member and no candidate now (paused, say) keeps its sessions.
        """
        if self._ring.slots != set(members):
            self._ring = Ring(members)
        self._expire(now)
        home = self._homes.pop(session, None)
        if home is None or home.ring is not self._ring:
            if home is not None:
                self.count[home.slot] -= 1
            home = _Home(self._place(session), self._ring, now)
            self.count[home.slot] += 1
        home.used = now
        self._homes[session] = home
        if home.slot in candidates:
            return home.slot
        order = [slot for slot in self._ring.walk(session) if slot in candidates]
        return order[0] if order else candidates[0]

    def finish(self, session: str) -> None:
        """The session sends nothing more. One that is not known is none."""
        home = self._homes.pop(session, None)
        if home is not None:
            self.count[home.slot] -= 1

    def _place(self, session: str) -> str:
        living = sum(self.count[slot] for slot in self._ring.slots) + 1
        most = math.ceil(BOUND * living / len(self._ring.slots))
        return next(slot for slot in self._ring.walk(session) if self.count[slot] < most)

    def _expire(self, now: float) -> None:
        while self._homes:
            session, home = next(iter(self._homes.items()))
            if now - home.used < self._idle_s:
                return
            self.finish(session)
