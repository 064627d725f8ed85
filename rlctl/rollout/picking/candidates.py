"""The fields of each stage that a pick compares, read once for each state of the fleet, because picks are frequent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.rollout.picking.pairs import decodes, prefills
from rlctl.v1.common_pb2 import (
    STAGE_STATE_DRAINING,
    STAGE_STATE_FAILED,
    STAGE_STATE_JOINING,
    STAGE_STATE_RETIRED,
    STAGE_STATE_UNREACHABLE,
)
from rlctl.v1.fleet_pb2 import Stage

_AWAY = (
    STAGE_STATE_JOINING,
    STAGE_STATE_UNREACHABLE,
    STAGE_STATE_DRAINING,
    STAGE_STATE_RETIRED,
    STAGE_STATE_FAILED,
)


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A stage.

    Attributes:
        sequence: of the version in the stage's report.
        revision: of the stage's report.
        adapters: names of the loaded adapters.
        closed_adapters: names of adapters that the stage takes no requests for at present.
        member: the stage is enabled and present, though perhaps paused.
        prefills, decodes: the stage is the prefill or the decode half of pairs.
    """

    stage: Stage
    slot: str
    incarnation: int
    routable: bool
    sequence: int
    revision: int
    adapters: frozenset[str]
    closed_adapters: frozenset[str]
    member: bool
    prefills: bool
    decodes: bool

    @classmethod
    def of(cls, stage: Stage) -> Candidate:
        """Read the fields of a stage of the fleet view."""
        return cls(
            stage,
            stage.registration.slot,
            stage.incarnation,
            stage.routable,
            stage.report.weight_version.sequence,
            stage.report.revision,
            frozenset(adapter.name for adapter in stage.report.adapters),
            closed_adapters(stage),
            stage.enabled and stage.state not in _AWAY,
            prefills(stage),
            decodes(stage),
        )


def closed_adapters(stage: Stage) -> frozenset[str]:
    """Return the adapters that an update is replacing at a stage, and the adapters under a pause by name."""
    paused = (*(each.adapter for each in stage.adapter_pauses), *(each.name for each in stage.report.paused_adapters))
    return frozenset({stage.report.closed_adapter, *paused} - {""})


class Candidates:
    """Stages of a model in slot order; "" for all models.

    Attributes:
        members: slots of the members that generate.
        prefill_members: slots of the members that compute prompts for others.
        paired: some stages form pairs.
        data_routes: routes that every data port has, as "POST /generate"; empty if stages form pairs.
    """

    def __init__(self, stages: Sequence[Stage], model: str) -> None:
        candidates = (Candidate.of(stage) for stage in stages if model in ("", stage.registration.model))
        self.all = sorted(candidates, key=lambda each: each.slot)
        self.members = [each.slot for each in self.all if each.member and not each.prefills]
        self.prefill_members = [each.slot for each in self.all if each.member and each.prefills]
        self.paired = any(each.prefills or each.decodes for each in self.all)
        self.data_routes: frozenset[str] = (
            frozenset() if self.paired else _common_routes([each.stage for each in self.all])
        )


def _common_routes(stages: Sequence[Stage]) -> frozenset[str]:
    registered = [stage.registration for stage in stages]
    routes = [frozenset(each.data_routes if each.data_address else ()) for each in registered]
    return routes[0].intersection(*routes[1:]) if routes else frozenset()
