"""Messages as JSON whose numbers are numbers: protobuf's own writes those of 64 bits as texts."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_WIDE = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def plain(message: Message) -> dict[str, Any]:
    """The message's fields, by their names in the contract; those that are not set too, unless they say so."""
    told: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for field in message.DESCRIPTOR.fields:
        if field.name in told:
            told[field.name] = _value(field, getattr(message, field.name), told[field.name])
    return told


def _value(field: Any, value: Any, told: Any) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kind = field.message_type.fields_by_name["value"]
        return {str(key): _one(kind, value[key], told[str(key)]) for key in value}
    if isinstance(told, list):
        return [_one(field, each, said) for each, said in zip(value, told, strict=True)]
    return _one(field, value, told)


def _one(field: Any, value: Any, told: Any) -> Any:
    if field.cpp_type in _WIDE:
        return int(told)
    return plain(value) if isinstance(told, dict) and isinstance(value, Message) else told
