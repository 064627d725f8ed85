"""JSON files beside weights: configs, indices, manifests."""

from __future__ import annotations

import json
from typing import Any


def parse(data: bytes) -> Any:
    """Parse a JSON text. Raises ValueError for invalid JSON, NaN, or nesting too deep to read.

    Python reads NaN although JSON has none. NaN is not equal to itself, so a config with NaN differs from its own copy.
    A checkpoint with NaN could be published, but never loaded. Infinity passes: some models' configs contain it.
    """
    try:
        return json.loads(data, parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def text(value: Any) -> str:
    """Return a string that UTF-8 can encode, for use in messages. Raises ValueError for any other value."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    value.encode()
    return value


def number(value: Any) -> int:
    """Return a size, an offset or a count. Raises ValueError for any other value."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0 on")
    return value


def shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor. Raises ValueError for any other value."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no shape")
    return tuple(map(number, value))


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it holds NaN, which is no JSON")
    return float(name)
