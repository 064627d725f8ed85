"""Enum values by the short names of the command line: "retract" for PAUSE_MODE_RETRACT."""

from __future__ import annotations

from google.protobuf.descriptor import EnumDescriptor

from rlctl.contract.errors import Reason


def short_names(enum: EnumDescriptor) -> dict[str, int]:
    """Return numbers by short name, in order, without the unspecified value."""
    prefix = _prefix(enum)
    return {value.name.removeprefix(prefix).lower(): value.number for value in enum.values if value.number}


def number(enum: EnumDescriptor, name: str, field: str) -> int:
    """Return the number of a short or full name; "" is unspecified. Raises FIELD_INVALID with the known names."""
    numbers = short_names(enum)
    key = name.lower().replace("-", "_")
    if not key:
        return 0
    if key in numbers:
        return numbers[key]
    if name in enum.values_by_name:
        return int(enum.values_by_name[name].number)
    raise Reason.FIELD_INVALID.error(f"{field} is {name!r}; it must be one of {', '.join(numbers)}", field=field)


def short_name(enum: EnumDescriptor, value: int) -> str:
    """Return the short name of a number; "" for unspecified, the digits of an unknown number."""
    if value not in enum.values_by_number:
        return str(value)
    return str(enum.values_by_number[value].name).removeprefix(_prefix(enum)).lower() if value else ""


def _prefix(enum: EnumDescriptor) -> str:
    return str(enum.values_by_number[0].name).removesuffix("UNSPECIFIED")
