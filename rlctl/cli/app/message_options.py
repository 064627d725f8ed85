"""Options from message fields: an option for each field, with the field's type and its comment as help.

The header, repeated messages and bytes have no options. A nested message is flattened by a single level:
``UpdateWeightsFromDiskRequest.options.pause`` is ``--pause``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from rlctl.cli.app.types import DURATION, EnumType
from rlctl.contract.comments import comment
from rlctl.contract.durations import duration
from rlctl.contract.errors import RlctlError

_DURATION = "google.protobuf.Duration"
_SIGNED = (
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_SFIXED32,
    FieldDescriptor.TYPE_SFIXED64,
)
_UNSIGNED = (
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED64,
)
_HIDDEN = {"rlctl.v1.UpdateOptions.verify": ("decode",)}
"""Values of a field that requests refuse, because a separate option sets these values."""


@dataclass(frozen=True)
class Field:
    """A field with an option.

    Attributes:
        path: the field, or the nested message's field and the inner field.
    """

    path: tuple[FieldDescriptor, ...]
    flag: str

    @property
    def name(self) -> str:
        """Name in errors."""
        return ".".join(field.name for field in self.path)

    @property
    def parameter(self) -> str:
        return "field_" + "_".join(field.name for field in self.path)


def fields_of(message: Any, reserved: Collection[str] = ()) -> list[Field]:
    """Return the fields of a request's descriptor that become options.

    A field with a name in ``reserved`` gets the prefix ``--request-``.
    """
    flags, fields = set(reserved), []
    for path in _paths(message):
        flag = "--" + path[-1].name.replace("_", "-")
        if flag in flags:
            flag = "--request-" + "-".join(field.name.replace("_", "-") for field in path)
        flags.add(flag)
        fields.append(Field(path, flag))
    return fields


def option(field: Field) -> click.Option:
    descriptor = field.path[-1]
    assert descriptor.containing_type is not None
    help_text = " ".join(comment(f"{descriptor.containing_type.full_name}.{descriptor.name}").split())
    names = [field.flag]
    attributes: dict[str, Any] = {"help": help_text, "default": None}
    if descriptor.type == FieldDescriptor.TYPE_BOOL and not descriptor.is_repeated:
        if descriptor.has_presence:
            names = [f"{field.flag}/--no-{field.flag.removeprefix('--')}"]
        else:
            attributes |= {"is_flag": True, "default": False}
        return click.Option([*names, field.parameter], **attributes)
    if descriptor.is_repeated:
        attributes["multiple"] = True
        attributes["help"] += "  [repeatable]"
        if field.flag.endswith("s"):
            names.insert(0, field.flag.removesuffix("s"))
    return click.Option([*names, field.parameter], type=_type(descriptor), **attributes)


def assign(message: Message, field: Field, value: Any) -> None:
    """Set a field to an option's value; no-op without a value. Raises click.BadParameter."""
    if value is None or value == () or (value is False and not field.path[-1].has_presence):
        return
    descriptor = field.path[-1]
    for step in field.path:
        set_field = message.WhichOneof(step.containing_oneof.name) if step.containing_oneof is not None else None
        if set_field not in (None, step.name):
            raise click.BadParameter(f"{field.flag} excludes --{set_field.replace('_', '-')}", param_hint=field.flag)
        if step is not descriptor:
            message = getattr(message, step.name)
    try:
        if descriptor.message_type is not None:
            values = [duration(item) for item in value] if descriptor.is_repeated else duration(value)
            if descriptor.is_repeated:
                getattr(message, descriptor.name).extend(values)
            else:
                getattr(message, descriptor.name).CopyFrom(values)
        elif descriptor.is_repeated:
            getattr(message, descriptor.name).extend(value)
        else:
            setattr(message, descriptor.name, value)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=field.flag) from None


def as_typed(error: RlctlError, options: Sequence[Field]) -> RlctlError:
    """Return the error with an option in place of the field that it names, if an option sets that field."""
    for field in options:
        if error.field == field.name:
            error.message = re.sub(rf"(?<![\w.-]){re.escape(field.name)}(?![\w.-])", field.flag, error.message)
            error.field = field.flag
    return error


def _paths(message: Any) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in message.fields:
        if field.name == "header" or field.type == FieldDescriptor.TYPE_BYTES:
            continue
        nested = field.message_type
        if nested is None or nested.full_name == _DURATION:
            yield (field,)
        elif not field.is_repeated:
            for inner in _plain(nested.fields):
                yield field, inner


def _plain(fields: Sequence[FieldDescriptor]) -> Iterator[FieldDescriptor]:
    for field in fields:
        if field.type == FieldDescriptor.TYPE_BYTES:
            continue
        if field.message_type is None or field.message_type.full_name == _DURATION:
            yield field


def _type(descriptor: FieldDescriptor) -> Any:
    if descriptor.enum_type is not None:
        return EnumType(descriptor.enum_type, _HIDDEN.get(descriptor.full_name, ()))
    if descriptor.message_type is not None:
        return DURATION
    if descriptor.type in _UNSIGNED:
        return click.IntRange(min=0)
    if descriptor.type in _SIGNED:
        return click.INT
    if descriptor.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return click.FLOAT
    if descriptor.type == FieldDescriptor.TYPE_BOOL:
        return click.BOOL
    return click.STRING
