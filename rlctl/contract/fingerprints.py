"""Fingerprints of tensors: enough of each digest to tell which tensors differ, for thousands in one message."""

from __future__ import annotations

from collections.abc import Mapping

SIZE = 8
"""Kept bytes of a tensor's digest. The whole digest decides whether a set of tensors is right."""


def fingerprints(digests: Mapping[str, str]) -> bytes:
    """Return the concatenated fingerprints in name order, from hex digests by name."""
    return b"".join(bytes.fromhex(digests[name][: 2 * SIZE]) for name in sorted(digests))


def differing(digests: Mapping[str, str], expected: bytes) -> list[str]:
    """Return the sorted names of the tensors with a different fingerprint; empty if the numbers of tensors differ."""
    if len(expected) != SIZE * len(digests):
        return []
    actual = fingerprints(digests)
    return [
        name
        for index, name in enumerate(sorted(digests))
        if actual[SIZE * index : SIZE * (index + 1)] != expected[SIZE * index : SIZE * (index + 1)]
    ]
