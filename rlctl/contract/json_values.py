"""Values of JSON where a number or a flag may come as text, as SGLang's and vLLM's own schemas take them. Pure.

Source: pydantic's conversion table, in lax mode. A flag is no number here: it is a mistake wherever a number is meant.
"""

from __future__ import annotations

import math
from typing import Any

_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}

_EXACT = 1 << 53
_LONGEST = 32


def of_kind(value: Any, kind: type) -> Any:
    """The value as an int, a float or a bool where it means one; any other value, or another kind, as it is."""
    if kind is bool:
        return _flag(value)
    if isinstance(value, bool) or kind not in (int, float):
        return value
    if isinstance(value, str):
        return _number(value.strip(), kind)
    if kind is int and isinstance(value, float) and abs(value) < _EXACT and value.is_integer():
        return int(value)
    return float(value) if kind is float and isinstance(value, int) else value


def _flag(value: Any) -> Any:
    if isinstance(value, str):
        return _FLAGS.get(value.lower(), value)
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _number(text: str, kind: type) -> Any:
    """The number, where it is one that JSON could have."""
    if not text.isascii() or "_" in text or len(text) > _LONGEST:
        return text
    try:
        number = kind(text)
    except ValueError:
        return text
    fits = -(1 << 63) <= number < 1 << 64 if kind is int else math.isfinite(number)
    return number if fits else text
