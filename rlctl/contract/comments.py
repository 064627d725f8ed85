"""The comments of the contract at run time, from the descriptor file beside the stubs.

Generated code carries no comments. Help texts, ``rlctl explain`` and the reference pages read the comments here, so
that each text is written once, in ``protos/``.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PACKAGE = "rlctl.v1"

ANSWERS = ("Effect", "Idempotency", "States", "Partial failure", "Retry", "Deadline")
"""Questions that the comment of every RPC answers, a line each."""

# Field numbers in the descriptor messages. The path of a source location consists of these numbers.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 4, 5, 6
_FIELD, _NESTED_MESSAGE, _NESTED_ENUM, _ONEOF = 2, 3, 4, 8
_VALUE = _METHOD = 2

_Path = tuple[int, ...]

_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


def comment(full_name: str) -> str:
    """Return the comment above a declaration, or "".

    ``full_name`` is ``rlctl.v1.Message``, ``.Message.field``, ``.Enum``, ``.Enum.VALUE``, ``.Service`` or
    ``.Service.Method``. Keeps lines; drops comment marks and lint directives.
    """
    return comments().get(full_name, "")


def summary(full_name: str) -> str:
    return comment(full_name).partition("\n")[0]


def rpc(service: str, method: str) -> tuple[str, dict[str, str]]:
    """Return (description, answers to :data:`ANSWERS`) from an RPC's comment. ``service`` is without the package.

    An answer extends to the next question.
    """
    prose: list[str] = []
    answers: dict[str, list[str]] = {}
    part = prose
    for line in comment(f"{PACKAGE}.{service}.{method}").splitlines():
        question, colon, answer = line.partition(": ")
        if colon and question in ANSWERS:
            part = answers.setdefault(question, [])
            line = answer
        if line:
            part.append(line.strip())
    return " ".join(prose), {question: " ".join(lines) for question, lines in answers.items()}


@functools.cache
def comments() -> Mapping[str, str]:
    data = importlib.resources.files(PACKAGE).joinpath("descriptor.binpb").read_bytes()
    texts: dict[str, str] = {}
    for file in FileDescriptorSet.FromString(data).file:
        if file.package == PACKAGE:
            texts.update(_of_file(file))
    return texts


def type_name(field: Any) -> str:
    """Return the type of a field in proto syntax: ``repeated string``, ``map<string, string>``, ``PauseMode``."""
    kind = field.message_type or field.enum_type
    if field.message_type is not None and kind.GetOptions().map_entry:
        return f"map<{type_name(kind.fields_by_name['key'])}, {type_name(kind.fields_by_name['value'])}>"
    name = kind.full_name.removeprefix(f"{PACKAGE}.") if kind is not None else _SCALARS[field.type]
    return f"repeated {name}" if field.is_repeated else str(name)


def _of_file(file: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    names = dict(_names(file))
    for location in file.source_code_info.location:
        name = names.get(tuple(location.path))
        if name is not None and location.leading_comments:
            yield name, _text(location.leading_comments)


def _text(raw: str) -> str:
    lines = [line.removeprefix(" ").rstrip() for line in raw.splitlines()]
    return "\n".join(line for line in lines if not line.startswith("buf:lint:")).strip()


def _names(file: FileDescriptorProto) -> Iterator[tuple[_Path, str]]:
    """Yield (path in the file, full name) of every declaration."""
    for index, message in enumerate(file.message_type):
        yield from _of_message((_FILE_MESSAGE, index), file.package, message)
    for index, enum in enumerate(file.enum_type):
        yield from _of_enum((_FILE_ENUM, index), file.package, enum)
    for index, service in enumerate(file.service):
        yield from _of_service((_FILE_SERVICE, index), file.package, service)


def _of_message(path: _Path, scope: str, message: DescriptorProto) -> Iterator[tuple[_Path, str]]:
    name = f"{scope}.{message.name}"
    yield path, name
    yield from _members((*path, _FIELD), name, message.field)
    yield from _members((*path, _ONEOF), name, message.oneof_decl)
    for index, nested in enumerate(message.nested_type):
        yield from _of_message((*path, _NESTED_MESSAGE, index), name, nested)
    for index, enum in enumerate(message.enum_type):
        yield from _of_enum((*path, _NESTED_ENUM, index), name, enum)


def _of_enum(path: _Path, scope: str, enum: EnumDescriptorProto) -> Iterator[tuple[_Path, str]]:
    name = f"{scope}.{enum.name}"
    yield path, name
    yield from _members((*path, _VALUE), name, enum.value)


def _of_service(path: _Path, scope: str, service: ServiceDescriptorProto) -> Iterator[tuple[_Path, str]]:
    name = f"{scope}.{service.name}"
    yield path, name
    yield from _members((*path, _METHOD), name, service.method)


def _members(path: _Path, scope: str, members: Sequence[Any]) -> Iterator[tuple[_Path, str]]:
    for index, member in enumerate(members):
        yield (*path, index), f"{scope}.{member.name}"
