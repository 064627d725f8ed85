"""Messages of the contract, drawn from their descriptors, and mutations of their bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf import message_factory
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from rlctl.contract.verbs import VERBS
from tests.fuzz import values

DEEPEST = 5
"""Deepest drawn message inside a message."""

_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}

Words = Mapping[str, Sequence[Any]]
"""Valid values by the name of a field."""


class Messages:
    """Draws messages.

    ``words``: values that valid requests have, by the name of the field. ``odd``: share of other values.
    """

    def __init__(self, chance: random.Random, words: Words, odd: float) -> None:
        self._chance = chance
        self._words = words
        self._odd = odd

    def message(self, descriptor: Any, depth: int = 0) -> Message:
        """Return a message of a type. Fields are set by chance, of a oneof at most one."""
        result: Message = message_factory.GetMessageClass(descriptor)()
        if isinstance(result, Packed):
            verb = self._chance.choice(sorted(VERBS))
            result.Pack(self.message(VERBS[verb].request.DESCRIPTOR, depth + 1))
            return result
        chosen = {oneof.name: self._chance.choice(oneof.fields).name for oneof in descriptor.oneofs}
        share = self._chance.choice((0.1, 0.4, 0.8))
        for field in descriptor.fields:
            oneof = field.containing_oneof
            if oneof is not None and len(oneof.fields) > 1:
                if chosen[oneof.name] == field.name and self._chance.random() < 0.9:
                    self._set(result, field, depth)
            elif self._chance.random() < self._share(field, share):
                self._set(result, field, depth)
        return result

    def _share(self, field: FieldDescriptor, share: float) -> float:
        """Return the chance of a field; fields that valid requests have are set more often."""
        if field.name == "validate_only":
            return 0.1
        return max(share, 0.85) if self._chance.random() > self._odd and field.name in self._words else share

    def _set(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return self._set_map(getattr(message, field.name), field.message_type, depth)
        if field.is_repeated:
            count = self._chance.choice((0, 1, 1, 1, 2, 3) if depth < 2 else (0, 1))
            if self._chance.random() < 0.01 * self._odd:
                count = 1000
            for _ in range(count):
                self._add(getattr(message, field.name), field, depth)
            return None
        if field.message_type is None:
            setattr(message, field.name, self._scalar(field))
        elif depth < DEEPEST:
            getattr(message, field.name).CopyFrom(self.message(field.message_type, depth + 1))
        return None

    def _set_map(self, entries: Any, entry: Descriptor, depth: int) -> None:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(self._chance.choice((0, 1, 2))):
            if value.message_type is None:
                entries[self._scalar(key)] = self._scalar(value)
            elif depth < DEEPEST:
                entries[self._scalar(key)].CopyFrom(self.message(value.message_type, depth + 1))

    def _add(self, repeated: Any, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is None:
            repeated.append(self._scalar(field))
        elif depth < DEEPEST:
            repeated.add().CopyFrom(self.message(field.message_type, depth + 1))

    def _scalar(self, field: FieldDescriptor) -> Any:
        chance, kind = self._chance, field.cpp_type
        if chance.random() > self._odd and (words := self._words.get(field.name)):
            word = chance.choice(words)
            if _fits(field, word):
                return word
        if field.enum_type is not None:
            if chance.random() < self._odd:
                return values.integer(chance, -(2**31), 2**31 - 1)
            return chance.choice(field.enum_type.values).number
        if kind in _RANGES:
            low, high = _RANGES[kind]
            return values.integer(chance, low, high) if chance.random() < self._odd else chance.randrange(4)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return chance.choice(values.FLOATS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return chance.randbytes(chance.choice((0, 1, 16, 32, 32, 33, 300)))
        return values.text(chance).encode(errors="replace").decode()


def _fits(field: FieldDescriptor, word: Any) -> bool:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return isinstance(word, bytes)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return isinstance(word, str)
    return isinstance(word, int) and field.cpp_type in _RANGES and word >= _RANGES[field.cpp_type][0]


def drawn(chance: random.Random, descriptor: Descriptor, words: Words) -> bytes:
    """Return the bytes of a request: valid as far as its fields allow, invalid, mutated, or no message at all."""
    kind = chance.random()
    if kind < 0.03:
        return chance.randbytes(chance.choice((0, 1, 2, 10, 100, 1000)))
    odd = chance.choice((0.0, 0.0, 0.05, 0.1, 0.3, 1.0))
    data = Messages(chance, words, odd).message(descriptor).SerializeToString()
    for _ in range(chance.choice((0, 0, 0, 1, 2, 4))):
        data = mutated(chance, data)
    return data


def mutated(chance: random.Random, data: bytes) -> bytes:
    """Return the bytes with one change: bits, lengths, fields of the wire format."""
    return chance.choice(_MUTATIONS)(chance, data)


def _flip(chance: random.Random, data: bytes) -> bytes:
    if not data:
        return b"\xff"
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]


def _truncate(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _insert(chance: random.Random, data: bytes) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.randbytes(chance.randrange(1, 5)) + data[place:]


def _delete_field(chance: random.Random, data: bytes) -> bytes:
    start, end = chance.choice(_fields(data) or [(0, 0)])
    return data[:start] + data[end:]


def _repeat_field(chance: random.Random, data: bytes) -> bytes:
    """Append a field again: a scalar is replaced, a message is merged, a list grows."""
    start, end = chance.choice(_fields(data) or [(0, 0)])
    return data + data[start:end] * chance.choice((1, 1, 2, 50))


def _renumber_field(chance: random.Random, data: bytes) -> bytes:
    start, _ = chance.choice(_fields(data) or [(0, 0)])
    tag = _varint(chance.randrange(1, 40) << 3 | chance.choice((0, 1, 2, 5)))
    return data[:start] + tag + data[start + 1 :]


def _unknown_field(chance: random.Random, data: bytes) -> bytes:
    number, body = chance.choice((1999, 2**29 - 1, 60)), chance.randbytes(chance.randrange(20))
    return data + _varint(number << 3 | 2) + _varint(len(body)) + body


def _overlong(chance: random.Random, data: bytes) -> bytes:
    """Append a field with a length or a number that no message has."""
    tag = _varint(chance.randrange(1, 30) << 3 | chance.choice((0, 2)))
    return data + tag + chance.choice((b"\xff" * 9 + b"\x01", b"\xff" * 11, b"\xff\xff\xff\xff\x7f", b"\x80\x00"))


def _nest(chance: random.Random, data: bytes) -> bytes:
    """Append groups, or a message inside itself, deeper than parsers allow."""
    depth, number = chance.choice((10, 99, 101, 500)), chance.randrange(1, 12)
    if chance.random() < 0.5:
        return data + bytes([number << 3 | 3]) * depth + bytes([number << 3 | 4]) * depth
    inner = data[:50]
    for _ in range(depth):
        inner = _varint(number << 3 | 2) + _varint(len(inner)) + inner
    return inner


_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_flip, _flip, _truncate, _insert, _delete_field, _repeat_field, _renumber_field),
    *(_unknown_field, _overlong, _nest),
)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _fields(data: bytes) -> list[tuple[int, int]]:
    """Return start and end of the outer fields, up to the first that is damaged."""
    fields, place = [], 0
    while place < len(data):
        start = place
        tag, place = _read_varint(data, place)
        if tag & 7 == 0:
            _, place = _read_varint(data, place)
        elif tag & 7 == 2:
            length, place = _read_varint(data, place)
            place += length
        elif tag & 7 in (1, 5):
            place += 8 if tag & 7 == 1 else 4
        else:
            break
        if place > len(data):
            break
        fields.append((start, place))
    return fields


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while place < len(data):
        number |= (data[place] & 127) << shift
        shift += 7
        place += 1
        if data[place - 1] < 128:
            return number, place
    return number, len(data) + 1
