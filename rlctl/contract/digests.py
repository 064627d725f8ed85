"""Digests of weights as text, with their function and key.

``HEX`` is a SHA-256. ``HEX@KEY`` is a keyed digest (:mod:`rlctl.weights.tensor.keyed_digest`) with the key in hex.
Digests of different functions or keys cannot be compared.
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
"""Bytes in the key of a keyed digest."""

SHA256_DIGITS, KEYED_DIGITS = 64, 32
"""Hex digits of the digest of one tensor."""

_BY_DIGEST = {VERIFICATION_LEVEL_RECEIVED, VERIFICATION_LEVEL_REPLICA, VERIFICATION_LEVEL_EXPECTED}
_HEX = frozenset("0123456789abcdef")


def with_key(digest: str, key: bytes) -> str:
    """Return the text of a digest from hex digits and key; an empty key means SHA-256."""
    return f"{digest}@{key.hex()}" if key else digest


def key_of(digest: str) -> bytes:
    """Return the key of a keyed digest; b"" for a SHA-256 and for any other text."""
    return bytes.fromhex(digest.partition("@")[2]) if is_digest(digest) else b""


def comparable(first: str, second: str) -> bool:
    """Return True if two digests have the same function and key."""
    return first.partition("@")[2] == second.partition("@")[2]


def is_digest(text: str) -> bool:
    """Return True for a SHA-256 and for a keyed digest."""
    digest, separator, key = text.partition("@")
    digits = len(digest) == 64 and not set(digest) - _HEX
    return digits and (not separator or (len(key) == 2 * KEY_BYTES and not set(key) - _HEX))


def computes_keyed_digests(capabilities: Capabilities) -> bool:
    """Return True if an engine computes keyed digests, or computes no digests at all."""
    return capabilities.keyed_digests or not _BY_DIGEST & {*capabilities.verification}


def keyed_digest_refusal(capabilities: Capabilities, request: CheckWeightsRequest, slot: str = "") -> RlctlError | None:
    """Return the refusal of a keyed check by a stage without keyed digests, else None."""
    if computes_keyed_digests(capabilities) or not (request.digest_key or key_of(request.expected_digest)):
        return None
    field = "digest_key" if request.digest_key else "expected_digest"
    engine = f"{slot}'s engine" if slot else "the engine"
    return Reason.UNSUPPORTED.error(f"{engine} computes no keyed digests", field=field)


def as_verified(request: CheckWeightsRequest) -> None:
    """Set AS_VERIFIED in a checksum of all weights without a named function: the cheapest check that finds damage.

    A report with the digest of every tensor keeps SHA-256, because other programs compute it as well.
    """
    checksum = request.action in (CHECK_ACTION_UNSPECIFIED, CHECK_ACTION_CHECKSUM)
    has_function = request.digest or request.digest_key or request.expected_digest
    without = request.HasField("model_digest") and not request.model_digest
    part = request.adapter or request.shadow or request.skip_tensors
    if checksum and not (has_function or without or part or request.per_tensor):
        request.digest = DIGEST_FUNCTION_AS_VERIFIED
