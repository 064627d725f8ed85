"""Digests of weights as text: which function made one, and with which key.

``HEX`` is a SHA-256. ``HEX@KEY`` is a keyed digest (:mod:`rlctl.weights.tensor.keyed_digest`) with the key in hex.
Digests of different functions or keys say nothing about each other.
"""

from __future__ import annotations

from rlctl.contract.errors import Reason, RlctlError
from rlctl.v1.common_pb2 import (
    VERIFICATION_LEVEL_EXPECTED,
    VERIFICATION_LEVEL_RECEIVED,
    VERIFICATION_LEVEL_REPLICA,
)
from rlctl.v1.fleet_pb2 import Capabilities
from rlctl.v1.verbs_pb2 import (
    CHECK_ACTION_CHECKSUM,
    CHECK_ACTION_UNSPECIFIED,
    DIGEST_FUNCTION_AS_VERIFIED,
    CheckWeightsRequest,
)

KEY_BYTES = 16
"""Length of the key of a keyed digest."""

SHA256_DIGITS, KEYED_DIGITS = 64, 32
"""Hex digits of the digest of one tensor."""

_BY_DIGEST = {VERIFICATION_LEVEL_RECEIVED, VERIFICATION_LEVEL_REPLICA, VERIFICATION_LEVEL_EXPECTED}
_HEX = frozenset("0123456789abcdef")


def with_key(digest: str, key: bytes) -> str:
    """The text of a digest, given its hex digits and its key; no key: a SHA-256."""
    return f"{digest}@{key.hex()}" if key else digest


def key_of(digest: str) -> bytes:
    """The key that a digest was made with; b"" for a SHA-256 and for any other text."""
    return bytes.fromhex(digest.partition("@")[2]) if is_digest(digest) else b""


def comparable(first: str, second: str) -> bool:
    """Whether two digests were made by the same function with the same key."""
    return first.partition("@")[2] == second.partition("@")[2]


def is_digest(text: str) -> bool:
    """Whether this is a digest of one of the two forms."""
    digest, at, key = text.partition("@")
    digits = len(digest) == 64 and not set(digest) - _HEX
    return digits and (not at or (len(key) == 2 * KEY_BYTES and not set(key) - _HEX))


def computes_keyed_digests(capabilities: Capabilities) -> bool:
    """Whether an engine computes keyed digests, if it digests anything."""
    return capabilities.keyed_digests or not _BY_DIGEST & {*capabilities.verification}


def keyed_digest_refusal(capabilities: Capabilities, request: CheckWeightsRequest, slot: str = "") -> RlctlError | None:
    """The refusal of a keyed check by a stage that computes no keyed digest; else None."""
    if computes_keyed_digests(capabilities) or not (request.digest_key or key_of(request.expected_digest)):
        return None
    field = "digest_key" if request.digest_key else "expected_digest"
    engine = f"{slot}'s engine" if slot else "the engine"
    return Reason.UNSUPPORTED.error(f"{engine} computes no keyed digests", field=field)


def as_verified(request: CheckWeightsRequest) -> None:
    """Set AS_VERIFIED in a checksum of all weights whose caller named no function, so that damage is found."""
    checksum = request.action in (CHECK_ACTION_UNSPECIFIED, CHECK_ACTION_CHECKSUM)
    named = request.digest or request.digest_key or request.expected_digest
    without = request.HasField("model_digest") and not request.model_digest
    if checksum and not (named or without or request.adapter or request.shadow or request.skip_tensors):
        request.digest = DIGEST_FUNCTION_AS_VERIFIED
