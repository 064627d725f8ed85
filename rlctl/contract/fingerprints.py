"""Fingerprints of tensors: as much of each digest as it takes to say which differ, for thousands in one message."""

from __future__ import annotations

from collections.abc import Mapping

SIZE = 8
"""Bytes of a tensor's digest that are kept. Whether a set of tensors is right is said by its whole digest."""


def fingerprints(digests: Mapping[str, str]) -> bytes:
    """Of every tensor, given its hex digest by name, one after the other in the order of the names."""
    return b"".join(bytes.fromhex(digests[name][: 2 * SIZE]) for name in sorted(digests))


def differing(digests: Mapping[str, str], expected: bytes) -> list[str]:
    """Names, in order, of the tensors whose fingerprint is another one; none when ``expected`` is of another number."""
    if len(expected) != SIZE * len(digests):
        return []
    found = fingerprints(digests)
    return [
        name
        for index, name in enumerate(sorted(digests))
        if found[SIZE * index : SIZE * (index + 1)] != expected[SIZE * index : SIZE * (index + 1)]
    ]
