"""Values as short texts for tables: without spaces if possible, "" for an empty value."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.durations import seconds
from rlctl.contract.enums import short_name
from rlctl.v1.common_pb2 import (
    VERIFICATION_LEVEL_NONE,
    Caller,
    ErrorDetail,
    Verification,
    VerificationLevel,
    WeightVersion,
)
from rlctl.v1.verbs_pb2 import Adapter


def name_of(enum: EnumDescriptor, value: int) -> str:
    """Return the name of a state or an outcome: READY."""
    return short_name(enum, value).upper()


def elapsed(value_s: float) -> str:
    """Return a time such as 12ms, 1.3s, 2m05s, 3h07m."""
    if value_s < 1:
        return f"{value_s * 1000:.0f}ms"
    if value_s < 60:
        return f"{value_s:.1f}s"
    minutes, rest = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m"


def duration(value: Duration) -> str:
    """Return a protobuf duration as :func:`elapsed`."""
    return elapsed(seconds(value))


def moment(value: Timestamp) -> str:
    """Return the local wall time, to the second."""
    return value.ToDatetime(UTC).astimezone().strftime("%Y-%m-%dT%H:%M:%S") if value.seconds else ""


def sequence(version: WeightVersion) -> str:
    """Return the sequence of a published version, else ""."""
    return str(version.sequence) if version.sequence else ""


def version(value: WeightVersion) -> str:
    """Return label and sequence: step-42#7."""
    return f"{value.label}#{value.sequence}" if value.sequence else value.label


def adapters(values: Iterable[Adapter]) -> str:
    """Return names and versions: math@a-1,code@a-3."""
    return joined(f"{value.name}@{value.version}" if value.version else value.name for value in values)


def verification(value: Verification) -> str:
    """Return the level of each kind: EXPECTED,PROBE,DECODE; NONE without verification; "" for weights of no update."""
    none = VERIFICATION_LEVEL_NONE
    levels = [level for level in (value.held, value.computed) if level > none] or [max(value.held, value.computed)]
    if value.decode:
        levels = [level for level in levels if level > none]
    names = [name_of(VerificationLevel.DESCRIPTOR, level) for level in levels if level]
    return joined([*names, *(["DECODE"] if value.decode else [])])


def error(detail: ErrorDetail) -> str:
    """Return reason and cause in a line."""
    return f"{detail.reason}: {' '.join(detail.message.split())}" if detail.reason else ""


def principal(caller: Caller) -> str:
    """Return a principal: ci, or ci via gateway-1."""
    return f"{caller.principal} via {caller.via}" if caller.via else caller.principal


def client(caller: Caller) -> str:
    """Return a client: cli/VERSION alice@host."""
    return " ".join(filter(None, ["/".join(filter(None, [caller.client, caller.client_version])), caller.user]))


def count(number: int, noun: str) -> str:
    """Return a count: 1 engine, 2 engines."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def yes(value: bool) -> str:
    return "yes" if value else "no"


def joined(items: Iterable[object]) -> str:
    return ",".join(str(item) for item in items)


def field(message: Message, descriptor: FieldDescriptor) -> str:
    """Return any field of any message, shortened to a line."""
    value = getattr(message, descriptor.name)
    if descriptor.is_repeated:
        return joined(_value(descriptor, item) for item in value)
    if descriptor.has_presence and not message.HasField(descriptor.name):
        return ""
    return _value(descriptor, value)


def _value(descriptor: FieldDescriptor, value: Any) -> str:
    if descriptor.enum_type is not None:
        return short_name(descriptor.enum_type, value)
    match value:
        case Duration():
            return duration(value)
        case Timestamp():
            return moment(value)
        case WeightVersion():
            return version(value)
        case Adapter():
            return adapters([value])
        case ErrorDetail():
            return error(value)
        case Message():
            return str(getattr(value, "name", "")) or "…"
        case bool():
            return yes(value)
        case bytes():
            return value.hex()
        case float():
            return f"{value:g}"
    return str(value)
