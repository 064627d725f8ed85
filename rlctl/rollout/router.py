"""Picks the stage of each request from what the coordinator last told of the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.errors import Reason, RlctlError
from rlctl.rollout.health import Health
from rlctl.rollout.pairs import decodes, fit, prefills
from rlctl.rollout.policies import LeastConnections, Policy
from rlctl.v1.common_pb2 import (
    STAGE_STATE_DIRTY,
    STAGE_STATE_DRAINING,
    STAGE_STATE_JOINING,
    STAGE_STATE_RETIRED,
    STAGE_STATE_UNREACHABLE,
)
from rlctl.v1.fleet_pb2 import Stage

REFUSALS = (Reason.STAGE_NOT_SERVING, Reason.VERSION_TOO_OLD)
"""The stage's state is in the way: another stage, or the same one a little later, is asked."""

FAULTS = (
    Reason.UNREACHABLE,
    Reason.LINK_LOST,
    Reason.RANK_LOST,
    Reason.RANK_SILENT,
    Reason.ENGINE_FAILED,
    Reason.ENGINE_WEDGED,
    Reason.HANDOVER_FAILED,
    Reason.CANCELLED,
    Reason.INTERNAL,
)
"""The stage is broken or ends, or the way to it does: another one is asked, so and so often."""

_AWAY = (STAGE_STATE_JOINING, STAGE_STATE_UNREACHABLE, STAGE_STATE_DRAINING, STAGE_STATE_RETIRED)


@dataclass(frozen=True)
class Wanted:
    """What a request needs of a stage.

    Attributes:
        model: "": any.
        adapter: stages that hold it are preferred.
        slot: this stage only; of a pair's, those pairs that it is one of.
        floor: least version, as a sequence number.
        session: what it belongs to.
    """

    model: str = ""
    adapter: str = ""
    slot: str = ""
    floor: int = 0
    session: str = ""


@dataclass(frozen=True)
class Picked:
    """Where a request goes.

    Attributes:
        stage: which generates it.
        at: when it was picked.
        prefill: which computes the prompt, where that is another one.
    """

    stage: Stage
    at: float
    prefill: Stage | None = None

    @property
    def slot(self) -> str:
        """Slot of the stage that generates."""
        return self.stage.registration.slot

    @property
    def slots(self) -> list[str]:
        """Slots of all that take part."""
        return [stage.registration.slot for stage in (self.stage, self.prefill) if stage is not None]


class Router:
    """The requests of one caller: where they are and how they fared. ``now`` is in seconds, and only grows."""

    def __init__(self, policy: Policy, health: Health | None = None, *, prefill: Policy | None = None) -> None:
        """``prefill`` picks prefill stages, which have loads and sessions of their own."""
        self._policy = policy
        self._prefill_policy = prefill or LeastConnections()
        self._health = health or Health()
        self.load: Counter[str] = Counter()
        """Requests in flight by slot."""

    def pick(self, stages: Sequence[Stage], wanted: Wanted, now: float) -> Picked | None:
        """A stage for the request, or a pair, in flight from now on until :meth:`end`; None: none can take it now."""
        ours = [stage for stage in stages if _is_wanted(stage, wanted)]
        able = [stage for stage in ours if self._may_take(stage, wanted, now)]
        ways = {stage.registration.slot: (stage, givers) for stage, givers in _ways(able, wanted.slot)}
        if not ways:
            return None
        leaders = [stage for stage, _ in ways.values()]
        stage = self._choose(self._policy, leaders, [s for s in ours if not prefills(s)], wanted, now)
        givers = ways[stage.registration.slot][1]
        prefill = None
        if givers:
            prefill = self._choose(self._prefill_policy, givers, [s for s in ours if prefills(s)], wanted, now)
        picked = Picked(stage, now, prefill)
        for slot in picked.slots:
            self._health.trying(slot, now)
            self.load[slot] += 1
        return picked

    def _choose(
        self, policy: Policy, able: Sequence[Stage], ours: Sequence[Stage], wanted: Wanted, now: float
    ) -> Stage:
        holders = [stage for stage in able if wanted.adapter in {held.name for held in stage.report.adapters}]
        candidates = {stage.registration.slot: stage for stage in holders or able}
        members = [stage.registration.slot for stage in ours if stage.enabled and stage.state not in _AWAY]
        return candidates[policy.pick(sorted(candidates), members or list(candidates), wanted.session, self.load, now)]

    def _may_take(self, stage: Stage, wanted: Wanted, now: float) -> bool:
        return (
            stage.routable
            and stage.report.weight_version.sequence >= wanted.floor
            and self._health.usable(stage.registration.slot, stage.incarnation, stage.report.revision, now)
        )

    def again_s(self, now: float) -> float:
        """How long until a stage that is left alone may be asked again; infinite: there is none."""
        return self._health.again_s(now)

    def answered(self, picked: Picked) -> None:
        """Whoever was asked took the request."""
        for slot in picked.slots:
            self._health.answered(slot)

    def failed(self, picked: Picked, failure: RlctlError, now: float, *, at: Stage | None = None) -> bool:
        """The request met a failure ``at`` a stage of those picked (None: the one that generates); returns whether it
        was the stage's, so that another one may be asked.
        """
        stage = at or picked.stage
        slot = stage.registration.slot
        if failure.reason in REFUSALS:
            self._health.refused(slot, stage.incarnation, stage.report.revision, picked.at, now)
            return True
        if failure.reason in FAULTS:
            self._health.failed(slot, stage.incarnation, picked.at, now)
            return True
        return False

    def end(self, picked: Picked) -> None:
        """The request has ended there, however it did."""
        for slot in picked.slots:
            self.load[slot] -= 1

    def finish(self, session: str) -> None:
        """The session sends nothing more."""
        self._policy.finish(session)
        self._prefill_policy.finish(session)


def obstacles(stages: Sequence[Stage], wanted: Wanted) -> str:
    """Why the request may go to none of the stages: "actor-0 PAUSED, actor-1 at version 3 of 4"."""
    ours = [stage for stage in stages if _is_wanted(stage, wanted)]
    found = [
        f"{stage.registration.slot} {why}"
        for stage in ours
        if (why := stage.not_routable or _too_old(stage, wanted.floor))
    ]
    able = [stage for stage in ours if stage.routable and not _too_old(stage, wanted.floor)]
    givers = [stage for stage in able if prefills(stage)]
    alone = [s.registration.slot for s in able if decodes(s) and not any(fit(giver, s) for giver in givers)]
    if alone:
        there = ", ".join(f"{s.registration.slot} at version {s.report.weight_version.sequence}" for s in givers)
        found.append(f"{', '.join(alone)} without a prefill stage that fits ({there or 'none may be asked'})")
    return ", ".join(found)


def next_step(stages: Sequence[Stage], wanted: Wanted) -> str:
    """What ends the wait where waiting does not: nobody but the trainer has what such stages lack. "" elsewhere."""
    ours = [stage for stage in stages if _is_wanted(stage, wanted)]
    lacking = any(stage.unhealable or stage.state == STAGE_STATE_DIRTY for stage in ours)
    return Reason.UNHEALABLE.next_step if lacking else ""


def _is_wanted(stage: Stage, wanted: Wanted) -> bool:
    """Whether the request may have to do with it: where one stage is named, also all that are one of a pair."""
    if wanted.model not in ("", stage.registration.model):
        return False
    return wanted.slot in ("", stage.registration.slot) or prefills(stage) or decodes(stage)


def _ways(able: Sequence[Stage], slot: str) -> list[tuple[Stage, list[Stage]]]:
    """Stages that may generate a request, each with the prefill stages one of which may compute its prompt (none: it
    does so itself). ``slot``: with this one only, in either part.
    """
    givers = [stage for stage in able if prefills(stage)]
    named = [stage for stage in givers if stage.registration.slot == slot]
    found: list[tuple[Stage, list[Stage]]] = []
    for stage in able:
        own = slot in ("", stage.registration.slot)
        if decodes(stage):
            fitting = [giver for giver in named or givers if fit(giver, stage)]
            if fitting and (own or named):
                found.append((stage, fitting))
        elif own and not prefills(stage):
            found.append((stage, []))
    return found


def _too_old(stage: Stage, floor: int) -> str:
    sequence = stage.report.weight_version.sequence
    return f"at version {sequence} of {floor}" if sequence < floor else ""
