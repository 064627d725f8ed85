"""Assigns sessions to stages on a hash ring, with a bound on the sessions of each stage.

On a plain ring of a few slots, a stage may get 1.5 times its share of sessions, and their KV entries evict each other.
So a stage takes sessions up to a bound above the mean, and further sessions go to the next stage on the ring. Source:
Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018. The bound is on live sessions, not
on running requests, because the KV entries of a session stay cached between its turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlctl.contract.errors import Reason
from rlctl.rollout.picking.hash_ring import Ring

BOUND = 1.25
"""Most sessions of a stage, as a multiple of the mean."""


@dataclass
class _Home:
    slot: str
    ring: Ring
    used: float


class Sessions:
    """Slots of the live sessions. A session ends with :meth:`finish`, or after ``idle_s`` without requests."""

    def __init__(self, idle_s: float) -> None:
        if not idle_s > 0:
            raise Reason.FIELD_INVALID.error(f"session_idle_s is {idle_s}; it must be above 0", field="session_idle_s")
        self._idle_s = idle_s
        self._homes: dict[str, _Home] = {}  # least recently used first
        self._ring = Ring(())
        self.count: Counter[str] = Counter()
        """Number of sessions by slot."""

    def home(self, session: str) -> str:
        """Return the slot of a session, or ""."""
        return self._homes[session].slot if session in self._homes else ""

    def pick(self, session: str, candidates: Sequence[str], members: Collection[str], now: float) -> str:
        """Return the session's slot if it is a candidate, else the first candidate in the session's order on the ring.

        ``members`` are all possible slots. A new member takes over its share of the sessions, each at the next request.
        A member that is no candidate now, such as a paused stage, keeps its sessions.
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
        """End a session. An unknown session is ignored."""
        home = self._homes.pop(session, None)
        if home is not None:
            self.count[home.slot] -= 1

    def _place(self, session: str) -> str:
        session_count = sum(self.count[slot] for slot in self._ring.slots) + 1
        max_sessions = math.ceil(BOUND * session_count / len(self._ring.slots))
        return next(slot for slot in self._ring.walk(session) if self.count[slot] < max_sessions)

    def _expire(self, now: float) -> None:
        while self._homes:
            session, home = next(iter(self._homes.items()))
            if now - home.used < self._idle_s:
                return
            self.finish(session)
