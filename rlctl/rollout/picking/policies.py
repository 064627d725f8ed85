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
        """One of the candidates.

        Args:
            candidates: slots that may serve it now, at least one, in order.
            members: slots of the model that are there, also those that are paused for a moment.
            session: what the sample belongs to; "": nothing.
            load: samples in flight by slot, of this caller.
            now: seconds, on a clock that only grows.
        """

    def finish(self, session: str) -> None:
        """The session sends nothing more."""


class RoundRobin:
    """By turns."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def pick(
        self, candidates: Sequence[str], members: Collection[str], session: str, load: Mapping[str, int], now: float
    ) -> str:
        """The next one."""
        del members, session, load, now
        return candidates[next(self._turns) % len(candidates)]

    def finish(self, session: str) -> None:
        """Nothing is kept."""


class LeastConnections:
    """To the stage with the fewest samples in flight; by turns among equals."""

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def pick(
        self, candidates: Sequence[str], members: Collection[str], session: str, load: Mapping[str, int], now: float
    ) -> str:
        """One with the least load."""
        least = min(load.get(slot, 0) for slot in candidates)
        equals = [slot for slot in candidates if load.get(slot, 0) == least]
        return self._turns.pick(equals, members, session, load, now)

    def finish(self, session: str) -> None:
        """Nothing is kept."""


class ConsistentHashing:
    """The samples of a session to one stage, which has the KV entries of its turns; see :class:`Sessions`."""

    def __init__(self, idle_s: float) -> None:
        self.sessions = Sessions(idle_s)
        self._without = LeastConnections()

    def pick(
        self, candidates: Sequence[str], members: Collection[str], session: str, load: Mapping[str, int], now: float
    ) -> str:
        """The session's stage; while that cannot serve, the next one on the ring. Without a session: least load."""
        if not session:
            return self._without.pick(candidates, members, session, load, now)
        return self.sessions.pick(session, candidates, members, now)

    def finish(self, session: str) -> None:
        """Its place is free again."""
        self.sessions.finish(session)


POLICIES = ("least_connections", "round_robin", "consistent_hashing")


def policy(name: str, *, session_idle_s: float) -> Policy:
    """A policy by its name. Raises FIELD_INVALID."""
    match name:
        case "least_connections":
            return LeastConnections()
        case "round_robin":
            return RoundRobin()
        case "consistent_hashing":
            return ConsistentHashing(session_idle_s)
    raise Reason.FIELD_INVALID.error(f"policy is {name!r}; it must be one of {', '.join(POLICIES)}", field="policy")
