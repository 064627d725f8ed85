"""The models and the adapter that a request is about, for the decision whether its caller may make it."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message

from rlctl.contract.access import Subject
from rlctl.contract.adapter_identity import adapter_of
from rlctl.contract.errors import RlctlError
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.operations.operations import Operations
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest, PauseGenerationRequest

_SELECTING = frozenset({"header", "model", "update_id", "operation_id"})
"""Fields that select a part of the fleet."""


def subject_of(request: Message, roster: Roster, operations: Operations) -> Subject | None:
    """The subject of a request as the fleet is now. A request without a target is about every model, one that cannot
    have a target about nothing.
    """
    if _SELECTING.isdisjoint(request.DESCRIPTOR.fields_by_name):
        return None
    adapter = adapter_of(request)
    header: RequestHeader = getattr(request, "header", RequestHeader())
    named = header.fence.update_id or getattr(request, "update_id", "") or getattr(request, "operation_id", "")
    operation = _operation(operations, named) if named else None
    if operation is not None:
        # A pause is about all requests of its targets unless it names an adapter, inside an update too.
        if not isinstance(request, PauseGenerationRequest | ContinueGenerationRequest):
            adapter = operation.adapter
        return Subject(_models_of(operation, roster), adapter)
    return Subject(_targeted(request, header, roster), adapter)


def _operation(operations: Operations, operation_id: str) -> Operation | None:
    try:
        return operations.get(operation_id).operation
    except RlctlError:  # the method itself refuses the id
        return None


def _models_of(operation: Operation, roster: Roster) -> frozenset[str]:
    if operation.model:
        return frozenset({operation.model})
    return _of_slots(operation.targets, roster)


def _targeted(request: Message, header: RequestHeader, roster: Roster) -> frozenset[str]:
    models = {name for name in (getattr(request, "model", ""), header.target.model) if name}
    slots = [*header.target.slots, *([header.for_slot] if header.for_slot else ())]
    models |= _of_slots(slots, roster)
    if not models:
        models = {slot.model for slot in roster.covered(Target(stages=header.target.stages))}
    return frozenset(models)


def _of_slots(names: Iterable[str], roster: Roster) -> frozenset[str]:
    return frozenset(roster.slots[name].model for name in names if name in roster.slots)
