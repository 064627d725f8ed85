"""JSON that lies beside weights: configs, indices, manifests."""

from __future__ import annotations

import json
from typing import Any


def parse(data: bytes) -> Any:
    """The value of a JSON text. Raises ValueError when it is none, holds NaN, or is nested too deep to be read.

    Python reads NaN although JSON has none. It equals nothing, itself included: a config that holds it fits no other,
    not even a copy, so that a checkpoint with it could be published and then never be loaded. Infinity passes: some
    models' configs have it.
    """
    try:
        return json.loads(data, parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def text(value: Any) -> str:
    """A value that is a text, of which messages can be made. Raises ValueError for any other."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    value.encode()
    return value


def number(value: Any) -> int:
    """A value that is a size, a place or a count. Raises ValueError for any other."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0 on")
    return value


def shape(value: Any) -> tuple[int, ...]:
    """A value that is the shape of a tensor. Raises ValueError for any other."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no shape")
    return tuple(map(number, value))


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("it holds NaN, which is no JSON")
    return float(name)
