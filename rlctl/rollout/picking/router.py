"""Picks the stage of each request from the watched fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rlctl.contract.errors import Reason, RlctlError
from rlctl.rollout.picking.candidates import Candidate, Candidates, closed_adapters
from rlctl.rollout.picking.health import Health
from rlctl.rollout.picking.pairs import decodes, fit, prefills
from rlctl.rollout.picking.policies import LeastConnections, Policy
from rlctl.v1.common_pb2 import STAGE_STATE_DIRTY
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


class Wanted(NamedTuple):
    """What a request needs of a stage.

    Attributes:
        model: "": any.
        adapter: stages that hold it are preferred, or, if the fleet ``serves`` it, are the only ones.
        slot: this stage only; of a pair's, those pairs that it is one of.
        preferred: the same where one of those may be asked now; else any.
        floor: least version, as a sequence number.
        session: what it belongs to.
        prefill: of a pair, the stage that computes the prompt, where it fits one that generates.
    """

    model: str = ""
    adapter: str = ""
    serves: bool = False
    slot: str = ""
    preferred: str = ""
    floor: int = 0
    session: str = ""
    prefill: str = ""


class Picked(NamedTuple):
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
        self._stages: Sequence[Stage] = ()
        self._models: dict[str, Candidates] = {}
        self.load: Counter[str] = Counter()
        """Requests in flight by slot."""

    def pick(self, stages: Sequence[Stage], wanted: Wanted, now: float) -> Picked | None:
        """A stage for the request, or a pair, in flight from now on until :meth:`end`; None: none can take it now.

        ``stages`` is looked at anew only when it is another list: it must not be changed.
        """
        ours = self.candidates(stages, wanted.model)
        able = [each for each in ours.all if self._may_take(each, wanted, now)]
        givers: Sequence[Candidate] = ()
        if ours.paired:
            ways = _ways(able, wanted.slot or wanted.preferred) or _ways(able, wanted.slot)
            able = [each for each, _ in ways]
        elif wanted.slot:
            able = [each for each in able if each.slot == wanted.slot]
        elif wanted.preferred:
            able = [each for each in able if each.slot == wanted.preferred] or able
        if not able:
            return None
        chosen = self._choose(self._policy, able, ours.members, wanted, now)
        if ours.paired:
            givers = next(fitting for each, fitting in ways if each is chosen)
        prefill = None
        if givers:
            givers = [each for each in givers if each.slot == wanted.prefill] or givers
            prefill = self._choose(self._prefill_policy, givers, ours.prefill_members, wanted, now)
        for each in (chosen, prefill):
            if each is not None:
                self._health.trying(each.slot, now)
                self.load[each.slot] += 1
        return Picked(chosen.stage, now, None if prefill is None else prefill.stage)

    def candidates(self, stages: Sequence[Stage], model: str) -> Candidates:
        """The stages of a model; read anew only when ``stages`` is another list."""
        if stages is not self._stages:
            self._stages, self._models = stages, {}
        if model not in self._models:
            self._models[model] = Candidates(stages, model)
        return self._models[model]

    def _choose(
        self, policy: Policy, able: Sequence[Candidate], members: Sequence[str], wanted: Wanted, now: float
    ) -> Candidate:
        if wanted.adapter:
            able = [each for each in able if wanted.adapter in each.adapters] or able
        slots = [each.slot for each in able]
        return able[slots.index(policy.pick(slots, members or slots, wanted.session, self.load, now))]

    def _may_take(self, candidate: Candidate, wanted: Wanted, now: float) -> bool:
        return (
            candidate.routable
            and candidate.sequence >= wanted.floor
            and (not wanted.serves or wanted.adapter in candidate.adapters)
            and wanted.adapter not in candidate.closed_adapters
            and self._health.usable(candidate.slot, candidate.incarnation, candidate.revision, now)
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
    if wanted.slot and not any(stage.registration.slot == wanted.slot for stage in stages):
        return f"there is no stage {wanted.slot!r}"
    ours = [stage for stage in stages if _is_wanted(stage, wanted)]
    found = [
        f"{stage.registration.slot} {why}" for stage in ours if (why := stage.not_routable or _lacks(stage, wanted))
    ]
    able = [stage for stage in ours if stage.routable and not _lacks(stage, wanted)]
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


def _ways(able: Sequence[Candidate], slot: str) -> list[tuple[Candidate, list[Candidate]]]:
    """Stages that may generate a request, each with the prefill stages one of which may compute its prompt (none: it
    does so itself). ``slot``: with this one only, in either part.
    """
    givers = [each for each in able if each.prefills]
    named = [each for each in givers if each.slot == slot]
    found: list[tuple[Candidate, list[Candidate]]] = []
    for each in able:
        own = slot in ("", each.slot)
        if each.decodes:
            fitting = [giver for giver in named or givers if fit(giver.stage, each.stage)]
            if fitting and (own or named):
                found.append((each, fitting))
        elif own and not each.prefills:
            found.append((each, []))
    return found


def _lacks(stage: Stage, wanted: Wanted) -> str:
    sequence = stage.report.weight_version.sequence
    if sequence < wanted.floor:
        return f"at version {sequence} of {wanted.floor}"
    if wanted.serves and wanted.adapter not in [adapter.name for adapter in stage.report.adapters]:
        return f"without adapter {wanted.adapter!r}"
    if wanted.adapter and wanted.adapter == stage.report.closed_adapter:
        return f"replacing adapter {wanted.adapter!r}"
    if wanted.adapter in closed_adapters(stage):
        return f"with adapter {wanted.adapter!r} paused by name"
    return ""
