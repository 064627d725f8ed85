"""The table of routes: what the coordinator does for each verb besides a fan-out.

The table of verbs (``rlctl/contract/verbs.py``) says which requests only read, and which wait for updates and heals.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.contract.verbs import spoils
from rlctl.coordinator.fleet.capabilities import refuse_keyed_check, refuse_unpaused
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.operations.context import Context
from rlctl.coordinator.operations.run import Run
from rlctl.coordinator.pauses.continue_when_resident import Waking
from rlctl.coordinator.pauses.pause import PAUSED_LATER, Pausing, refuse_unknown_adapter
from rlctl.coordinator.transaction import adapters
from rlctl.coordinator.transaction.transfer import Transfer
from rlctl.coordinator.updates.from_disk import FromDisk
from rlctl.coordinator.updates.implicit import Implicit
from rlctl.coordinator.updates.manager import Updates
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.results_pb2 import ExcludedStage


@dataclass(frozen=True)
class Parts:
    """The parts of a coordinator that carry out verbs."""

    context: Context
    updates: Updates
    implicit: Implicit
    disk: FromDisk
    transfer: Transfer
    waking: Waking
    pausing: Pausing


@dataclass(frozen=True)
class Call:
    """An accepted request. ``attempt``: attempt of the request's update at the acceptance."""

    request: Any
    targets: list[Slot]
    run: Run
    timeout_s: float
    deadline: float
    attempt: int


Selection = Callable[[Parts, Any], tuple[list[Slot], list[ExcludedStage]]]
Work = Callable[[Parts, Call], Awaitable[object]]


def _always(_: Any) -> bool:
    return True


def _for_slot(header: RequestHeader) -> bool:
    return bool(header.for_slot)


@dataclass(frozen=True)
class Route:
    """How the coordinator carries out a request. The default is a fan-out to the stages of the target.

    Attributes:
        implicit: returns True for the header of a request without an update id that :class:`Implicit` carries out.
        opens: opens an update whose whole content is the request.
        selects: returns the targets and the excluded stages of a request without an update id.
        refuses: raises for targets that the request must not have.
        settles: a request without an update id commits the open implicit updates of its targets first.
        joins_update: a request without an update id is a step of the open implicit update of its targets, if any.
        absent: reason in the record of an excluded absent stage; "": as selected.
        leaves_groups: the targets leave a group. No further call joins the operation that formed the group.
        despite_cancel: the work begins although the operation was cancelled before.
        ends_serving: returns True if the targets stop serving. Routing followers confirm this before the work.
        work: carries out an accepted request.
        by_name: carries out an accepted request without an update id; None: as ``work``.
        of_adapter: route of a request that names an adapter; None: this route.
    """

    implicit: Callable[[RequestHeader], bool] = lambda _: False
    opens: Callable[[FromDisk, Any, float], Awaitable[Run]] | None = None
    selects: Selection = lambda parts, request: parts.context.roster.select(request.header.target)
    refuses: Callable[[Parts, Any, Sequence[Slot]], None] = lambda *_: None
    settles: bool = False
    joins_update: bool = False
    absent: str = ""
    leaves_groups: bool = False
    despite_cancel: bool = False
    ends_serving: Callable[[Any], bool] = lambda _: False
    work: Work = lambda parts, call: parts.context.fanout.step(call.request, call.targets, call.run, call.deadline)
    by_name: Work | None = None
    of_adapter: Route | None = None


async def _pause(parts: Parts, call: Call) -> None:
    await parts.pausing.pause(call.request, call.targets, call.run, call.deadline)
    parts.updates.look_after_all(call.request.header.target)


async def _continue_adapter(parts: Parts, call: Call) -> None:
    await parts.pausing.go_on_with(call.request, call.targets, call.run, call.deadline)
    parts.updates.look_after_all(call.request.header.target)


async def _unload_adapter(parts: Parts, call: Call) -> None:
    model = parts.context.roster.models[call.targets[0].model]
    await adapters.unload(call.request, model, call.targets, call.run, call.deadline, parts.context)


def _refuse_adapter(parts: Parts, request: Any, targets: Sequence[Slot]) -> None:
    refuse_unknown_adapter(parts.context.roster, request.adapter, targets)


def _refuse_adapter_pause(parts: Parts, request: Any, targets: Sequence[Slot]) -> None:
    _refuse_adapter(parts, request, targets)
    refuse_unpaused(targets, request)


_DEFAULT = Route()

_WRITE = Route(
    implicit=_always,
    despite_cancel=True,  # a cancelled write must end the wait of its source
    work=lambda parts, call: parts.updates.receive(call.request, call.run, call.timeout_s, call.attempt),
)

ROUTES: dict[str, Route] = {
    "PauseGeneration": Route(
        absent=PAUSED_LATER,
        ends_serving=_always,
        by_name=_pause,
        of_adapter=Route(refuses=_refuse_adapter_pause, absent=PAUSED_LATER, by_name=_pause),
    ),
    "ContinueGeneration": Route(
        settles=True,
        by_name=lambda parts, call: parts.pausing.go_on(call.request, call.targets, call.run, call.deadline),
        of_adapter=Route(refuses=_refuse_adapter, work=_continue_adapter),
    ),
    "FlushCache": Route(joins_update=True),
    "ReleaseMemory": Route(ends_serving=spoils),
    "ResumeMemory": Route(
        settles=True,
        by_name=lambda parts, call: parts.waking.resume(call.request, call.targets, call.run, call.deadline),
    ),
    "UpdateWeightsFromDisk": Route(
        implicit=lambda header: bool(header.for_slot or header.unkeyed), opens=FromDisk.update
    ),
    "UpdateWeightsFromTensor": _WRITE,
    "UpdateWeightsFromDistributed": _WRITE,
    "InitWeightsUpdateGroup": Route(
        implicit=_for_slot,
        work=lambda parts, call: parts.transfer.join_group(call.request, call.targets, call.run, call.timeout_s),
    ),
    "DestroyWeightsUpdateGroup": Route(leaves_groups=True),
    "CheckWeights": Route(
        refuses=lambda _, request, targets: refuse_keyed_check(targets, request), ends_serving=spoils
    ),
    "LoadAdapter": Route(implicit=_for_slot, opens=FromDisk.load_adapter),
    "UnloadAdapter": Route(
        implicit=_for_slot,
        selects=lambda parts, request: parts.updates.adapter_holders(request),
        work=_unload_adapter,
    ),
}
"""By verb. All other verbs take the default."""


def route_of(request: Any) -> Route:
    route = ROUTES.get(request.DESCRIPTOR.name.removesuffix("Request"), _DEFAULT)
    return route.of_adapter if route.of_adapter is not None and request.adapter else route


def is_implicit(request: Any) -> bool:
    """Whether :class:`Implicit` carries out a request."""
    header: RequestHeader = request.header
    return not header.validate_only and not header.fence.update_id and route_of(request).implicit(header)
