"""Protobuf messages as JSON with 64-bit integers as numbers. Protobuf's own JSON has 64-bit integers as strings."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_WIDE = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def plain(message: Message) -> dict[str, Any]:
    """Return the fields by their names in the contract. Unset fields are included, except fields with presence."""
    converted: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for field in message.DESCRIPTOR.fields:
        if field.name in converted:
            converted[field.name] = _value(field, getattr(message, field.name), converted[field.name])
    return converted


def _value(field: Any, value: Any, converted: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kind = field.message_type.fields_by_name["value"]
        return {str(key): _one(kind, value[key], converted[str(key)]) for key in value}
    if isinstance(converted, list):
        return [_one(field, each, item) for each, item in zip(value, converted, strict=True)]
    return _one(field, value, converted)


def _one(field: Any, value: Any, converted: Any) -> Any:
    if field.cpp_type in _WIDE:
        return int(converted)
    return plain(value) if isinstance(converted, dict) and isinstance(value, Message) else converted
