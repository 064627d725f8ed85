"""Values at the limits of their types, and texts that break naive code."""

from __future__ import annotations

import random
from typing import Any

_POWERS = tuple(sign * 2**bits for bits in (31, 32, 53, 62, 63, 64) for sign in (1, -1))
INTEGERS = (0, 1, -1, 2, 3, 255, 256, 65_536, *(power + more for power in _POWERS for more in (-1, 0, 1)))
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 5e-324, 1e-30, 3.4e38, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", " ", "a", "x" * 255, "x" * 300, "x" * 5000, "\x00", "a\x00b", "a\nb", "\r\n\r\n", "\t", "\x1b[2J", "\x7f"),
    *("é", "\u202e", "\u2028", "\U0001f600", "e\u0301", "İ", "\ufeff", "\ufffe", "𝟎", "０", "٣"),
    *("../../../../etc/passwd", "/etc/passwd", "/", ".", "..", "~", "a/../b", "//", "/proc/self/mem", "/dev/zero"),
    *("%s%n", "{0.__class__}", "${HOME}", "`id`", "'; DROP TABLE record; --", "<script>", "*", "[a-z]", "(a+)+$"),
    *("null", "None", "NaN", "Infinity", "-1", "1e999", "0x10", "true", "__proto__", "__class__", "constructor"),
    *("127.0.0.1:1", "127.0.0.1:99999", "[::1]:0", "unix:/nowhere", "http://127.0.0.1:1", "127.0.0.1:x", ":", "::"),
)

_SHARE = len(TEXTS) / 0.9


def text(chance: random.Random) -> str:
    """Return a text; one of a thousand has 200,000 characters."""
    kind = chance.random()
    if kind < 0.9:
        return TEXTS[int(kind * _SHARE)]
    if kind < 0.999:
        return chr(97 + chance.getrandbits(4)) + chr(0x20A0 + chance.getrandbits(5)) * chance.getrandbits(2)
    return "y" * 200_000


_JSON_INTEGERS = (*INTEGERS, 10**400)


def integer(chance: random.Random, low: int, high: int) -> int:
    """Return an integer of a range, mostly at a limit."""
    if chance.random() < 0.3:
        return chance.randint(low, high)
    number: int = chance.choice(INTEGERS)
    return min(max(number, low), high)


_SIZES = (0, 1, 1, 2, 3)


def json_value(chance: random.Random, depth: int = 0) -> Any:
    """Return a JSON value. Also NaN, integers without limit, and lone surrogates, which Python writes."""
    kind = int(chance.random() * (14, 12, 10, 9)[min(depth, 3)])
    if kind < 2:
        return chance.choice((None, True, False))
    if kind < 4:
        return chance.choice(_JSON_INTEGERS)
    if kind < 5:
        return chance.choice(FLOATS)
    if kind < 8:
        return text(chance)
    if kind < 9:
        return chance.choice(("\ud83d", "a\udc00", "\ud800\ud800"))
    if kind < 11:
        size = 300 if chance.random() < 0.001 else chance.choice(_SIZES)
        return [json_value(chance, depth + 1) for _ in range(size)]
    return {text(chance): json_value(chance, depth + 1) for _ in range(chance.choice(_SIZES))}
