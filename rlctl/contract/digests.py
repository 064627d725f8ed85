"""Digests of weights as text: which function made one, and with which key.

``HEX`` is a SHA-256. ``HEX@KEY`` is a keyed digest (:mod:`rlctl.weights.tensor.keyed_digest`) with the key in hex.
Digests of different functions or keys say nothing about each other.
"""

from __future__ import annotations

KEY_BYTES = 16
"""Length of the key of a keyed digest."""

_HEX = frozenset("0123456789abcdef")


def with_key(digest: str, key: bytes) -> str:
    """The text of a digest, given its hex digits and its key; no key: a SHA-256."""
    return f"{digest}@{key.hex()}" if key else digest


def key_of(digest: str) -> bytes:
    """The key that a digest was made with; b"" for a SHA-256, and for no digest."""
    return bytes.fromhex(digest.partition("@")[2])


def comparable(first: str, second: str) -> bool:
    """Whether two digests were made by the same function with the same key."""
    return key_of(first) == key_of(second)


def is_digest(text: str) -> bool:
    """Whether this is a digest of one of the two forms."""
    digest, at, key = text.partition("@")
    digits = len(digest) == 64 and not set(digest) - _HEX
    return digits and (not at or (len(key) == 2 * KEY_BYTES and not set(key) - _HEX))
