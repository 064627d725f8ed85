"""Parsed bodies of requests, with fields checked by type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, overload

import orjson

from rlctl.contract.errors import Reason
from rlctl.contract.json_values import of_kind
from rlctl.v1.rollout_pb2 import TokenIds

_MISSING: Any = object()
T = TypeVar("T")


def dump(value: Any, field: str = "body") -> bytes:
    """Encode a parsed value as JSON. Raises FIELD_INVALID: the encoder accepts less nesting than the parser."""
    try:
        return orjson.dumps(value, default=_listed)
    except TypeError as error:
        raise Reason.FIELD_INVALID.error(f"{field} cannot be written as JSON: {error}", field=field) from None


def _listed(value: object) -> list[int]:
    """Convert a prompt of a large body to a list."""
    if isinstance(value, TokenIds):
        return list(value.ids)
    raise TypeError(f"{type(value).__name__} is no JSON")


class Fields:
    """Fields of a JSON object. Fields that are never taken are unknown.

    ``where`` precedes a field's name in errors, such as "init_info.".
    """

    def __init__(self, values: Any, where: str = "") -> None:
        """Raises FIELD_INVALID if ``values`` is no object."""
        if not isinstance(values, dict):
            raise Reason.FIELD_INVALID.error("a JSON object is required", field=where.rstrip(".") or "body")
        self.values: Mapping[str, Any] = values
        self._where = where
        self._taken: set[str] = set()

    @overload
    def take(self, name: str, kind: type[T]) -> T: ...
    @overload
    def take(self, name: str, kind: type[T], default: None) -> T | None: ...
    @overload
    def take(self, name: str, kind: type[T], default: T) -> T: ...
    @overload
    def take(self, name: str, kind: UnionType, default: Any = ...) -> Any: ...

    def take(self, name: str, kind: Any, default: Any = _MISSING) -> Any:
        """Take a field, or its default if the field is absent or null. A field without default is required.

        A number or a flag may be a text (:mod:`rlctl.contract.json_values`); a flag is no number. Raises
        FIELD_REQUIRED, FIELD_INVALID.
        """
        self._taken.add(name)
        value = self.values.get(name)
        if value is None:
            if default is _MISSING:
                raise Reason.FIELD_REQUIRED.error(f"{self._where}{name} is required", field=self._where + name)
            return default
        original, value = value, of_kind(value, kind) if isinstance(kind, type) else value
        if not _fits(value, kind):
            kind_name = kind.__name__ if isinstance(kind, type) else str(kind)
            raise Reason.FIELD_INVALID.error(f"{_short(original)} is no {kind_name}", field=self._where + name)
        return value

    def take_list(self, name: str, kind: type[T], default: Sequence[T] | None = _MISSING) -> Any:
        """Take a list with elements of one type; as :meth:`take`."""
        values = self.take(name, list, default)
        if set(map(type, values or ())) <= {kind}:
            return values
        if kind in (int, float, bool):
            values = [of_kind(value, kind) for value in values or ()]
        for index, value in enumerate(values or ()):
            if not _fits(value, kind):
                raise Reason.FIELD_INVALID.error(
                    f"{_short(value)} is no {kind.__name__}", field=f"{self._where}{name}[{index}]"
                )
        return values

    def take_fields(self, name: str, default: Mapping[str, Any] | None = None) -> Fields:
        """Take an object with its own fields; as :meth:`take`."""
        value = self.take(name, dict, default)
        return Fields(dict(value or {}), f"{self._where}{name}.")

    def refuse(self, without: Mapping[str, Sequence[Any]]) -> None:
        """Raise UNSUPPORTED for a field with an effect. ``without``: the values without effect, by field."""
        for name, nothing in without.items():
            value = self.take(name, object, None)
            if value is not None and value not in nothing:
                raise Reason.UNSUPPORTED.error(f"this fleet does not support {name}", field=self.path(name))

    def accept(self, *names: str) -> None:
        """Accept fields without effect."""
        self._taken.update(names)

    def rename(self, old: str, new: str) -> None:
        if old in self.values:
            rest = {name: value for name, value in self.values.items() if name != old}
            self.values = {**rest, new: self.values[old]}

    def path(self, name: str) -> str:
        """Return a field's name in errors."""
        return self._where + name

    def forget(self) -> None:
        """Drop the values, and keep the names."""
        self.values = dict.fromkeys(self.values)

    @property
    def unknown(self) -> list[str]:
        """Fields that were never taken."""
        return [self._where + name for name in self.values if name not in self._taken]


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, UnionType):
        return any(_fits(value, each) for each in kind.__args__)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
