"""The models and the adapter of a request, for the decision whether the caller may make the request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from rlctl.contract.access import Subject
from rlctl.contract.adapter_identity import adapter_of
from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.operations.operations import Operations
from rlctl.coordinator.verbs.routes import is_implicit, route_of
from rlctl.v1.common_pb2 import RequestHeader, Target
from rlctl.v1.results_pb2 import Operation
from rlctl.v1.update_pb2 import BeginWeightUpdateRequest, CommitWeightUpdateRequest
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest, PauseGenerationRequest, UnloadAdapterRequest

_SELECTING = frozenset({"header", "model", "update_id", "operation_id"})
"""Fields that select a part of the fleet."""


def _opens_update(request: Message) -> bool:
    """Whether a request opens an update, and so belongs to no open update."""
    return isinstance(request, BeginWeightUpdateRequest) or route_of(request).opens is not None


def refuse_fence(request: Any) -> None:
    """Raise FIELD_CONFLICT for a request with a fence that would be ignored."""
    if _opens_update(request) and request.header.fence.update_id:
        raise Reason.FIELD_CONFLICT.error(
            f"{request.DESCRIPTOR.name.removesuffix('Request')} opens an update of its own",
            field="header.fence.update_id",
            next_step="Omit the fence.",
        )


def subject_of(request: Message, roster: Roster, operations: Operations) -> Subject | None:
    """Return the subject of a request in the present fleet. Without a target, the subject is every model.

    A request of a type without targets has no subject. The subject includes every model that the coordinator may change
    for the request. Each field therefore counts for exactly the requests for which the coordinator reads the field.
    """
    fields = request.DESCRIPTOR.fields_by_name
    if _SELECTING.isdisjoint(fields):
        return None
    header: RequestHeader = getattr(request, "header", RequestHeader())
    adapter = adapter_of(request)
    named = getattr(request, "update_id", "") or getattr(request, "operation_id", "")
    if named:
        operation = _operation(operations, named)
        return Subject(_every(roster), adapter) if operation is None else _of(operation, roster)
    if "update_id" not in fields and not _opens_update(request):
        update = _update(operations, header.fence.update_id)
        if update is not None:
            return _fenced(request, header, _of(update, roster), roster)
    return Subject(_targeted(request, header, roster), adapter)


def _fenced(request: Message, header: RequestHeader, update: Subject, roster: Roster) -> Subject:
    """Return the subject of a request with a fence: the update, and the models that the request itself names.

    An ended update counts too: the method then refuses the request with the cause, or returns a recorded result.
    """
    if isinstance(request, PauseGenerationRequest | ContinueGenerationRequest):
        # A pause is about all requests of the targets, or about an adapter. A continue ends the pauses of the
        # adapter at the target in the header.
        return Subject(update.models | _targeted(request, header, roster), adapter_of(request))
    models = update.models | _named(header.target, roster)
    if isinstance(request, UnloadAdapterRequest):
        return Subject(models, adapter_of(request))
    return Subject(models, update.adapter if models == update.models else "")


def _operation(operations: Operations, operation_id: str) -> Operation | None:
    try:
        return operations.get(operation_id).operation
    except RlctlError:  # the method itself refuses the id
        return None


def _update(operations: Operations, update_id: str) -> Operation | None:
    operation = _operation(operations, update_id) if update_id else None
    return operation if operation is not None and operation.update_id == operation.operation_id else None


def _of(operation: Operation, roster: Roster) -> Subject:
    models = {operation.model} if operation.model else set()
    return Subject(_of_slots(operation.targets, roster) | models, operation.adapter)


def _targeted(request: Message, header: RequestHeader, roster: Roster) -> frozenset[str]:
    """Return the models of a request without an update."""
    target, named = header.target, _named(header.target, roster)
    if isinstance(request, BeginWeightUpdateRequest):
        models = _of_engine(request.model, header.for_slot if request.implicit else "", roster)
    elif isinstance(request, CommitWeightUpdateRequest) or (hasattr(request, "header") and is_implicit(request)):
        models = _of_engine(target.model, header.for_slot, roster)
    else:
        models = named or frozenset(slot.model for slot in roster.covered(Target(stages=target.stages)))
    return (models or _every(roster)) | named


def _of_engine(model: str, slot: str, roster: Roster) -> frozenset[str]:
    """Return the model of a request for a whole model, also if the request names a single engine."""
    return _of_slots([slot], roster) | ({model} if model else set())


def _named(target: Target, roster: Roster) -> frozenset[str]:
    return _of_slots(target.slots, roster) | ({target.model} if target.model else set())


def _every(roster: Roster) -> frozenset[str]:
    return frozenset(slot.model for slot in roster.slots.values())


def _of_slots(names: Iterable[str], roster: Roster) -> frozenset[str]:
    return frozenset(roster.slots[name].model for name in names if name in roster.slots)
