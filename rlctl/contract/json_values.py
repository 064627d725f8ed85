"""JSON values with numbers or flags as text, read as SGLang's and vLLM's own schemas read such values. Pure.

Source: pydantic's conversion table, in lax mode. A flag is never read as a number: a flag in place of a number is a
mistake.
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
    """Return the value as an int, a float or a bool if the value denotes that kind, else unchanged."""
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
    """Return the number if JSON could hold it, else the text."""
    if not text.isascii() or "_" in text or len(text) > _LONGEST:
        return text
    try:
        number = kind(text)
    except ValueError:
        return text
    in_range = -(1 << 63) <= number < 1 << 64 if kind is int else math.isfinite(number)
    return number if in_range else text
