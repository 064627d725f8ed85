"""What clients saw, and what is wrong with it. A call that failed may have happened; nothing else is assumed."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

OK = "OK"
NOTHING = ("FAILED", "CANCELLED")
"""Ends of an update that was not published, when the coordinator itself says so."""

LATE_S = 10.0
"""A call may end so much after its deadline: the SDK waits 5 s more for the coordinator's word."""


@dataclass
class Update:
    """One weight update as its trainer saw it. Times are of CLOCK_MONOTONIC, which the processes of a machine share.

    Attributes:
        state: "OK", "PARTIAL", "FAILED", ... as the coordinator said; "" when the call failed or never ended.
        ranks: outcomes of every rank, by slot.
        excluded: slots that were left out from the start.
        ended: None when its trainer was killed in between.
    """

    label: str
    invoked: float
    deadline_s: float
    ended: float | None = None
    state: str = ""
    error: str = ""
    sequence: int = 0
    ranks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    excluded: Sequence[str] = ()


@dataclass
class Token:
    """One stretch of output and what it was stamped with. ``time``: when it came."""

    time: float
    label: str
    sequence: int


@dataclass
class Generation:
    """One request to one stage. ``ended`` is None while it runs."""

    started: float
    deadline_s: float
    ended: float | None = None
    slot: str = ""
    tokens: list[Token] = field(default_factory=list)
    error: str = ""


@dataclass
class History:
    """Everything that was seen of one fleet. ``first``: label of the version that it began with."""

    ranks: Mapping[str, int]
    first: str = "initial"
    updates: list[Update] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)

    def violations(self) -> list[str]:
        """What must not have been seen, in words."""
        return [*self._admitted(), *self._monotone(), *self._ok_means_all(), *self._on_time()]

    def _admitted(self) -> list[str]:
        """No token of a version that nobody can have published by then, or that was not published at all."""
        wrong = []
        updates = {update.label: update for update in self.updates}
        sequences: dict[str, int] = {update.label: update.sequence for update in self.updates if update.sequence}
        for generation in self.generations:
            for token in generation.tokens:
                where = f"{generation.slot} at {token.time:.3f}: token of {token.label!r}"
                if sequences.setdefault(token.label, token.sequence) != token.sequence:
                    wrong.append(f"{where} has sequence {token.sequence}, not {sequences[token.label]}")
                if token.label == self.first:
                    continue
                update = updates.get(token.label)
                if update is None:
                    wrong.append(f"{where}, which nobody sent")
                elif token.time < update.invoked:
                    wrong.append(f"{where} before it was begun")
                elif update.state in NOTHING:
                    wrong.append(f"{where}, whose update ended {update.state}")
        return wrong

    def _monotone(self) -> list[str]:
        """What begins after a version was seen, or its update was OK, never sees an older one."""
        seen = [(token.time, token.sequence) for generation in self.generations for token in generation.tokens]
        published = [(update.ended, update.sequence) for update in self.updates if update.ended and update.state == OK]
        known = sorted([*seen, *published])
        times = [time for time, _ in known]
        newest = list(itertools.accumulate((sequence for _, sequence in known), max))
        wrong = []
        for generation in self.generations:
            before = bisect.bisect_left(times, generation.started)
            floor = newest[before - 1] if before else 0
            last = 0
            for token in generation.tokens:
                if token.sequence < max(floor, last):
                    where = f"{generation.slot}: request of {generation.started:.3f} got {token.label!r}"
                    wrong.append(f"{where} ({token.sequence}) after version {max(floor, last)} was known")
                last = token.sequence
        ends = [update for update in sorted(self.updates, key=lambda u: u.invoked) if update.state == OK]
        for earlier, later in itertools.pairwise(ends):
            if later.sequence <= earlier.sequence:
                wrong.append(f"{later.label!r} has sequence {later.sequence} after {earlier.sequence}")
        return wrong

    def _ok_means_all(self) -> list[str]:
        """An update that is OK was confirmed by every rank of every stage that was not left out."""
        wrong = []
        for update in self.updates:
            if update.state != OK:
                continue
            if not update.ranks or not set(update.ranks) | set(update.excluded) >= set(self.ranks):
                wrong.append(f"{update.label!r} is OK, confirmed by {sorted(update.ranks)} of {sorted(self.ranks)}")
            for slot, outcomes in update.ranks.items():
                if list(outcomes) != ["APPLIED"] * self.ranks[slot]:
                    wrong.append(f"{update.label!r} is OK, {slot}'s ranks are {list(outcomes)}")
        return wrong

    def _on_time(self) -> list[str]:
        """Every call ended by its deadline, but those of trainers that were killed."""
        calls: list[tuple[str, float, float, float | None]] = [
            (f"update {update.label!r}", update.invoked, update.deadline_s, update.ended)
            for update in self.updates
            if update.ended is not None
        ]
        calls += [(f"request to {g.slot or 'any'}", g.started, g.deadline_s, g.ended) for g in self.generations]
        wrong = []
        for what, started, deadline_s, ended in calls:
            if ended is None:
                wrong.append(f"{what} of {started:.3f} never ended")
            elif ended - started > deadline_s + LATE_S:
                wrong.append(f"{what} of {started:.3f} took {ended - started:.1f} s of {deadline_s:g}")
        return wrong
