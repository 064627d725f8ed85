"""Rules for requests, checked before any state is read. Pure: invalid input never changes state.

:func:`check` looks in every message for enum values that this version does not know and for impossible times, and then
applies the rule of the message's type, which a module of :mod:`rlctl.contract.rules` has. Coordinator, stage and worker
all call :func:`check`, so a request is refused with the same words everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.errors import Reason
from rlctl.contract.rules import fields, fleet, generation, updates, weight_checks, weights
from rlctl.v1 import update_pb2

_FIRST_S, _LAST_S = -62_135_596_800, 253_402_300_799
"""Seconds of the first and the last time that a protobuf Timestamp may have."""

_ON_OPEN_UPDATE = (
    update_pb2.RetryWeightUpdateRequest,
    update_pb2.CommitBatchRequest,
    update_pb2.CommitWeightUpdateRequest,
    update_pb2.AbortWeightUpdateRequest,
    update_pb2.RenewLeaseRequest,
)

_RULES: Mapping[type[Message], Callable[..., None]] = {
    **generation.RULES,
    **weights.RULES,
    **weight_checks.RULES,
    **updates.RULES,
    **fleet.RULES,
}


def check(request: Message) -> None:
    """Raise an :class:`rlctl.contract.errors.RlctlError` that names the field if the request is invalid."""
    kind = request.DESCRIPTOR
    _values(request, "")
    if _has_header(kind):
        header = request.header  # type: ignore[attr-defined]
        fields.timeout(header, "timeout", "header.")
        if header.request_id:
            fields.request_id(header.request_id, "header.request_id")
        if header.validate_only and isinstance(request, _ON_OPEN_UPDATE):
            raise fields.invalid("validate_only does not apply to a step of an open update", "header.validate_only")
    for field in _labels(kind):
        if label := getattr(request, field):  # every sample and every list of stages carries the label
            fields.name(label, field, fields.MOST_LABEL)
    rule = _RULES.get(type(request))
    if rule is not None:
        rule(request)


def _values(message: Message, path: str) -> None:
    for descriptor in _fields_with_rules(message.DESCRIPTOR):
        where = f"{path}{descriptor.name}"
        value = getattr(message, descriptor.name)
        if descriptor.enum_type is not None:
            for number in value if descriptor.is_repeated else [value]:
                if number not in descriptor.enum_type.values_by_number:
                    raise Reason.UNKNOWN_ENUM_VALUE.error(
                        f"{where} is {number}, which {descriptor.enum_type.full_name} does not have",
                        field=where,
                    )
        elif descriptor.is_repeated:
            for index, item in enumerate(value):
                _values(item, f"{where}[{index}].")
        elif message.HasField(descriptor.name):
            if isinstance(value, Timestamp):
                _time(value, where)
            else:
                _values(value, f"{where}.")


def _time(value: Timestamp, field: str) -> None:
    """Refuse a time that protobuf does not define: Python raises ValueError wherever such a time is read or shown."""
    if not (_FIRST_S <= value.seconds <= _LAST_S and 0 <= value.nanos < 10**9):
        raise fields.invalid(
            f"{field} is {value.seconds} s and {value.nanos} ns; a time is in the years 1 to 9999", field
        )


# Lookups by message type are cached: requests for samples come by the thousand a second.


@functools.cache
def _has_header(kind: Descriptor) -> bool:
    return "header" in kind.fields_by_name


@functools.cache
def _labels(kind: Descriptor) -> tuple[str, ...]:
    candidates = [kind.fields_by_name.get(name) for name in ("version", "weight_version", "target_version")]
    return tuple(field.name for field in candidates if field is not None and field.type == field.TYPE_STRING)


@functools.cache
def _fields_with_rules(kind: Descriptor) -> tuple[FieldDescriptor, ...]:
    """Return the fields of a message that are or contain enums or times; the thousands of shapes in buckets do not."""
    return tuple(field for field in kind.fields if _leads_to_rule(field, set()))


def _leads_to_rule(field: FieldDescriptor, seen: set[str]) -> bool:
    inner = field.message_type
    if inner is None:
        return field.enum_type is not None
    if inner.full_name == Timestamp.DESCRIPTOR.full_name:
        return True
    if inner.GetOptions().map_entry or inner.full_name in seen:
        return False
    seen.add(inner.full_name)
    return any(_leads_to_rule(deeper, seen) for deeper in inner.fields)
