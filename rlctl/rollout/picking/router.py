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

REFUSALS = (Reason.STAGE_NOT_SERVING, Reason.VERSION_TOO_OLD, Reason.TOO_MANY_REQUESTS)
"""Refusals due to the stage's state or load: the request goes to another stage, or to the same stage later."""

FAULTS = (
    Reason.UNREACHABLE,
    Reason.TLS_FAILED,
    Reason.LINK_LOST,
    Reason.RANK_LOST,
    Reason.RANK_SILENT,
    Reason.ENGINE_FAILED,
    Reason.ENGINE_WEDGED,
    Reason.HANDOVER_FAILED,
    Reason.CANCELLED,
    Reason.INTERNAL,
)
"""Failures of the stage or its connection: the request goes to another stage, a limited number of times."""


class Wanted(NamedTuple):
    """Requirements of a request for its stage.

    Attributes:
        model: model name; "" for any.
        adapter: prefer stages with this adapter, or require the adapter if the fleet ``serves`` it.
        slot: require this stage, alone or in either half of a pair.
        preferred: prefer this stage in the same way; otherwise any.
        floor: least version, as a sequence number.
        session: session of the sample.
        prefill: preferred prefill stage of a pair.
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
    """A picked stage or pair.

    Attributes:
        stage: the generating stage.
        at: time of the pick.
        prefill: the prefill stage of a pair.
    """

    stage: Stage
    at: float
    prefill: Stage | None = None

    @property
    def slot(self) -> str:
        """Slot of the generating stage."""
        return self.stage.registration.slot

    @property
    def slots(self) -> list[str]:
        """Slots of all stages of the pick."""
        return [stage.registration.slot for stage in (self.stage, self.prefill) if stage is not None]


class Router:
    """Picks stages for one caller, by load and health. ``now`` is in seconds on a monotonic clock."""

    def __init__(self, policy: Policy, health: Health | None = None, *, prefill: Policy | None = None) -> None:
        """``prefill`` picks prefill stages, with their own loads and sessions."""
        self._policy = policy
        self._prefill_policy = prefill or LeastConnections()
        self._health = health or Health()
        self._stages: Sequence[Stage] = ()
        self._models: dict[str, Candidates] = {}
        self.load: Counter[str] = Counter()
        """Requests in flight by slot."""

    def pick(self, stages: Sequence[Stage], wanted: Wanted, now: float) -> Picked | None:
        """Return a stage or pair for the request, or None if no stage may take the request now.

        The pick counts as load until :meth:`end`. ``stages`` is read again only if the list is a new object, so callers
        must not change the list.
        """
        candidates = self.candidates(stages, wanted.model)
        suitable = [each for each in candidates.all if self._may_take(each, wanted, now)]
        prefill_candidates: Sequence[Candidate] = ()
        if candidates.paired:
            ways = _ways(suitable, wanted.slot or wanted.preferred) or _ways(suitable, wanted.slot)
            suitable = [each for each, _ in ways]
        elif wanted.slot:
            suitable = [each for each in suitable if each.slot == wanted.slot]
        elif wanted.preferred:
            suitable = [each for each in suitable if each.slot == wanted.preferred] or suitable
        if not suitable:
            return None
        chosen = self._choose(self._policy, suitable, candidates.members, wanted, now)
        if candidates.paired:
            prefill_candidates = next(fitting for each, fitting in ways if each is chosen)
        prefill = None
        if prefill_candidates:
            prefill_candidates = [
                each for each in prefill_candidates if each.slot == wanted.prefill
            ] or prefill_candidates
            prefill = self._choose(self._prefill_policy, prefill_candidates, candidates.prefill_members, wanted, now)
        for each in (chosen, prefill):
            if each is not None:
                self._health.trying(each.slot, now)
                self.load[each.slot] += 1
        return Picked(chosen.stage, now, None if prefill is None else prefill.stage)

    def candidates(self, stages: Sequence[Stage], model: str) -> Candidates:
        """Return the candidates of a model. ``stages`` is read again only if the list is a new object."""
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
        """Return the seconds until an avoided stage may be tried again; infinite if no stage is avoided."""
        return self._health.again_s(now)

    def answered(self, picked: Picked) -> None:
        """Record that the picked stages accepted the request."""
        for slot in picked.slots:
            self._health.answered(slot)

    def failed(self, picked: Picked, failure: RlctlError, now: float, *, at: Stage | None = None) -> bool:
        """Record a failure ``at`` a picked stage, by default the generating stage.

        Returns True if the stage caused the failure, so that the request may go elsewhere.
        """
        stage = at or picked.stage
        slot = stage.registration.slot
        if failure.reason in REFUSALS:
            self._health.refused(slot, stage.incarnation, stage.report.revision, picked.at, now, failure)
            return True
        if failure.reason in FAULTS:
            self._health.failed(slot, stage.incarnation, picked.at, now, failure)
            return True
        return False

    def failures(self, stages: Sequence[Stage], wanted: Wanted) -> list[tuple[Stage, RlctlError]]:
        """Return suitable stages with their latest refusal or failure.

        A stage that has accepted a request since is left out.
        """
        suitable = (each for each in stages if _is_wanted(each, wanted) and each.routable and not _lacks(each, wanted))
        last_errors = (
            (each, self._health.last_error(each.registration.slot, each.incarnation, each.report.revision))
            for each in suitable
        )
        return [(stage, error) for stage, error in last_errors if error is not None]

    def end(self, picked: Picked) -> None:
        """Record the end of the request at the picked stages, after success or failure."""
        for slot in picked.slots:
            self.load[slot] -= 1

    def finish(self, session: str) -> None:
        """End a session."""
        self._policy.finish(session)
        self._prefill_policy.finish(session)


def obstacles(stages: Sequence[Stage], wanted: Wanted) -> str:
    """Return why no stage may take the request, such as "actor-0 PAUSED, actor-1 at version 3 of 4"."""
    if wanted.slot and not any(stage.registration.slot == wanted.slot for stage in stages):
        return f"there is no stage {wanted.slot!r}"
    wanted_stages = [stage for stage in stages if _is_wanted(stage, wanted)]
    reasons = [
        f"{stage.registration.slot} {why}"
        for stage in wanted_stages
        if (why := stage.not_routable or _lacks(stage, wanted))
    ]
    suitable = [stage for stage in wanted_stages if stage.routable and not _lacks(stage, wanted)]
    prefill_stages = [stage for stage in suitable if prefills(stage)]
    unpaired = [
        s.registration.slot for s in suitable if decodes(s) and not any(fit(prefill, s) for prefill in prefill_stages)
    ]
    if unpaired:
        prefill_versions = ", ".join(
            f"{s.registration.slot} at version {s.report.weight_version.sequence}" for s in prefill_stages
        )
        reasons.append(
            f"{', '.join(unpaired)} without a prefill stage that fits ({prefill_versions or 'none may be asked'})"
        )
    return ", ".join(reasons)


def next_step(stages: Sequence[Stage], wanted: Wanted) -> str:
    """Return the next step of UNHEALABLE if a stage is unhealable or DIRTY, else "".

    Such stages need weights that only the trainer has.
    """
    wanted_stages = [stage for stage in stages if _is_wanted(stage, wanted)]
    needs_weights = any(stage.unhealable or stage.state == STAGE_STATE_DIRTY for stage in wanted_stages)
    return Reason.UNHEALABLE.next_step if needs_weights else ""


def _is_wanted(stage: Stage, wanted: Wanted) -> bool:
    """Return whether the request may involve the stage. With a required slot, this includes all halves of pairs."""
    if wanted.model not in ("", stage.registration.model):
        return False
    return wanted.slot in ("", stage.registration.slot) or prefills(stage) or decodes(stage)


def _ways(able: Sequence[Candidate], slot: str) -> list[tuple[Candidate, list[Candidate]]]:
    """Return the stages that may generate a request, each with its suitable prefill stages.

    A stage without prefill stages computes the prompt itself. With ``slot``, each result contains that slot.
    """
    prefill_candidates = [each for each in able if each.prefills]
    in_slot = [each for each in prefill_candidates if each.slot == slot]
    ways: list[tuple[Candidate, list[Candidate]]] = []
    for each in able:
        slot_fits = slot in ("", each.slot)
        if each.decodes:
            fitting = [prefill for prefill in in_slot or prefill_candidates if fit(prefill.stage, each.stage)]
            if fitting and (slot_fits or in_slot):
                ways.append((each, fitting))
        elif slot_fits and not each.prefills:
            ways.append((each, []))
    return ways


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
