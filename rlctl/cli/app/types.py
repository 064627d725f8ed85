"""Types of command-line values: durations, enums by short names, NAME=VALUE pairs."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from google.protobuf.descriptor import EnumDescriptor

from rlctl.contract.enums import number, short_names
from rlctl.contract.errors import RlctlError

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:  # generic only in new releases of click
    ParamType = click.ParamType

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
LONGEST_S = 10 * 365 * _UNITS["d"]
"""Timers and deadlines hold a few hundred years at most."""
_NUMBERS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|m|h|d|)")


class DurationType(ParamType):
    """A time such as 30s, 500ms, 2m, 1h or 90d; a bare number is seconds. Converts to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds, above zero."""
        seconds = 0.0
        if isinstance(value, int | float):
            seconds = float(value)
        elif match := _DURATION.fullmatch(str(value).strip()):
            seconds = float(match[1]) * _UNITS[match[2]]
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is not a time above zero; write 500ms, 30s, 2m, 1h or 90d", param, ctx)
        if seconds > LONGEST_S:
            self.fail(f"{value!r} is too long a time: at most {LONGEST_S / _UNITS['d']:.0f}d", param, ctx)
        return seconds


DURATION = DurationType()


class NumbersType(ParamType):
    """Whole numbers in an order, such as 0,1,4-7. Converts to a tuple of numbers."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers: list[int] = []
        for part in str(value).split(","):
            match = _NUMBERS.fullmatch(part.strip())
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if first > last:
                self.fail(f"{value!r} is not numbers such as 0,1,4-7", param, ctx)
            numbers += range(first, last + 1)
        return tuple(numbers)


NUMBERS = NumbersType()


class DeviceType(ParamType):
    """A device to compute on: auto, cpu, cuda or cuda:N. Converts to the same word."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not _DEVICE.fullmatch(str(value)):
            self.fail(f"{value!r} is none of auto, cpu, cuda or cuda:N", param, ctx)
        return str(value)


DEVICE = DeviceType()


class LevelType(ParamType):
    """A level of Python's logging by name, in any case. Converts to the name in upper case."""

    name = "level"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        levels = logging.getLevelNamesMapping()
        level = str(value).upper()
        if level not in levels:
            self.fail(f"{value!r} is none of {', '.join(sorted(levels, key=levels.__getitem__))}", param, ctx)
        return level


LEVEL = LevelType()


class EnumType(ParamType):
    """A value of a protobuf enum by short name ("retract") or full name. Converts to the number."""

    def __init__(self, enum: EnumDescriptor, hidden: Collection[str] = ()) -> None:
        """``hidden``: short names that help and completion do not offer."""
        self.enum = enum
        self.name = enum.name
        self.offered = [name for name in short_names(enum) if name not in hidden]

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        del param, ctx
        return f"[{'|'.join(self.offered)}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        enum_number = 0
        with contextlib.suppress(RlctlError):
            enum_number = number(self.enum, value, self.name)
        if not enum_number:
            self.fail(f"{value!r} is none of {', '.join(self.offered)}", param, ctx)
        return enum_number

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del ctx, param
        return [CompletionItem(name) for name in self.offered if name.startswith(incomplete)]


def pairs(options: tuple[str, ...]) -> dict[str, str]:
    """Return settings of the form NAME=VALUE. Raises click.BadParameter."""
    pairs = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise click.BadParameter(f"{option!r} is not NAME=VALUE", param_hint="--option")
        pairs[name] = value
    return pairs
