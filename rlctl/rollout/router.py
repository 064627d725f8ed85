"""Picks the stage of each request from what the coordinator last told of the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.errors import Reason, RlctlError
from rlctl.rollout.health import Health
from rlctl.rollout.policies import Policy
from rlctl.v1.common_pb2 import (
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
        slot: this stage only.
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
    """A request's stage, and when it was picked."""

    stage: Stage
    at: float

    @property
    def slot(self) -> str:
        """Its slot."""
        return self.stage.registration.slot


class Router:
    """The requests of one caller: where they are and how they fared. ``now`` is in seconds, and only grows."""

    def __init__(self, policy: Policy, health: Health | None = None) -> None:
        self._policy = policy
        self._health = health or Health()
        self.load: Counter[str] = Counter()
        """Requests in flight by slot."""

    def pick(self, stages: Sequence[Stage], wanted: Wanted, now: float) -> Picked | None:
        """A stage for the request, which is in flight from now on until :meth:`end`; None: none can take it now."""
        ours = [stage for stage in stages if _is_wanted(stage, wanted)]
        able = [stage for stage in ours if self._may_take(stage, wanted, now)]
        holders = [stage for stage in able if wanted.adapter in {held.name for held in stage.report.adapters}]
        candidates = {stage.registration.slot: stage for stage in holders or able}
        if not candidates:
            return None
        members = [stage.registration.slot for stage in ours if stage.enabled and stage.state not in _AWAY]
        members = members or list(candidates)
        slot = self._policy.pick(sorted(candidates), members, wanted.session, self.load, now)
        self._health.trying(slot, now)
        self.load[slot] += 1
        return Picked(candidates[slot], now)

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
        """The stage took the request."""
        self._health.answered(picked.slot)

    def failed(self, picked: Picked, failure: RlctlError, now: float) -> bool:
        """The request met a failure; returns whether it was the stage's, so that another one may be asked."""
        stage = picked.stage
        if failure.reason in REFUSALS:
            self._health.refused(picked.slot, stage.incarnation, stage.report.revision, picked.at, now)
            return True
        if failure.reason in FAULTS:
            self._health.failed(picked.slot, stage.incarnation, picked.at, now)
            return True
        return False

    def end(self, picked: Picked) -> None:
        """The request has ended there, however it did."""
        self.load[picked.slot] -= 1

    def finish(self, session: str) -> None:
        """The session sends nothing more."""
        self._policy.finish(session)


def obstacles(stages: Sequence[Stage], wanted: Wanted) -> str:
    """Why the request may go to none of the stages: "actor-0 PAUSED, actor-1 at version 3 of 4"."""
    return ", ".join(
        f"{stage.registration.slot} {why}"
        for stage in stages
        if _is_wanted(stage, wanted) and (why := stage.not_routable or _too_old(stage, wanted.floor))
    )


def _is_wanted(stage: Stage, wanted: Wanted) -> bool:
    registration = stage.registration
    return wanted.model in ("", registration.model) and wanted.slot in ("", registration.slot)


def _too_old(stage: Stage, floor: int) -> str:
    sequence = stage.report.weight_version.sequence
    return f"at version {sequence} of {floor}" if sequence < floor else ""
