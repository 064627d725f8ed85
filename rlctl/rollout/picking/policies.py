"""Policies of a pick among suitable stages: in turn, by load, or by session."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from rlctl.contract.errors import Reason
from rlctl.rollout.picking.sessions import Sessions


class Policy(Protocol):
    """Picks a stage."""

    def pick(
        self, candidates: Sequence[str], members: Collection[str], session: str, load: Mapping[str, int], now: float
    ) -> str:
        """Return a candidate.

        Args:
            candidates: slots that may serve the sample now, in order; never empty.
            members: slots of the model's stages that are enabled and present, including paused stages.
            session: session of the sample; "" for no session.
            load: this caller's samples in flight by slot.
            now: seconds on a monotonic clock.
        """

    def finish(self, session: str) -> None:
        """End a session."""


class RoundRobin:
    """Picks stages in turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def pick(
        self, candidates: Sequence[str], members: Collection[str], session: str, load: Mapping[str, int], now: float
    ) -> str:
        """Return the next candidate."""
        del members, session, load, now
        return candidates[next(self._turns) % len(candidates)]

    def finish(self, session: str) -> None:
        """Do nothing: no session is kept."""


class LeastConnections:
    """Picks the stage with the fewest samples in flight, and equal stages in turn."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def pick(
        self, candidates: Sequence[str], members: Collection[str], session: str, load: Mapping[str, int], now: float
    ) -> str:
        """Return a candidate with the least load."""
        lowest_load = min(load.get(slot, 0) for slot in candidates)
        equals = [slot for slot in candidates if load.get(slot, 0) == lowest_load]
        return self._turns.pick(equals, members, session, load, now)

    def finish(self, session: str) -> None:
        """Do nothing: no session is kept."""


class ConsistentHashing:
    """Picks the same stage for all samples of a session, to reuse its KV entries; see :class:`Sessions`."""

    def __init__(self, idle_s: float) -> None:
        self.sessions = Sessions(idle_s)
        self._without = LeastConnections()

    def pick(
        self, candidates: Sequence[str], members: Collection[str], session: str, load: Mapping[str, int], now: float
    ) -> str:
        """Return the session's stage, or the next on the ring if that cannot serve. Without a session: least load."""
        if not session:
            return self._without.pick(candidates, members, session, load, now)
        return self.sessions.pick(session, candidates, members, now)

    def finish(self, session: str) -> None:
        """Free the session's place."""
        self.sessions.finish(session)


POLICIES = ("least_connections", "round_robin", "consistent_hashing")


def policy(name: str, *, session_idle_s: float) -> Policy:
    """Return a policy by name. Raises FIELD_INVALID."""
    match name:
        case "least_connections":
            return LeastConnections()
        case "round_robin":
            return RoundRobin()
        case "consistent_hashing":
            return ConsistentHashing(session_idle_s)
    raise Reason.FIELD_INVALID.error(f"policy is {name!r}; it must be one of {', '.join(POLICIES)}", field="policy")
