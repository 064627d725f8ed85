"""The identity of a caller: from HTTP headers to a token and a request id of the contract."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence

import orjson

from rlctl.contract.errors import Reason
from rlctl.sdk.aio import AsyncFleet
from rlctl.v1.coordinator_pb2 import ReserveRequestIdRequest, ReserveRequestIdResponse

KEYS = ("Idempotency-Key", "X-Request-Id")
_LONGEST = 256
_RESERVE_S = 30.0


def token(headers: Mapping[str, str]) -> str | None:
    """Return the bearer token of a request, if present. Raises TOKEN_MISSING for an invalid header."""
    header = headers.get("Authorization")
    if header is None:
        return None
    scheme, _, value = header.partition(" ")
    value = value.strip()
    if scheme.lower() != "bearer" or not value or not (value.isascii() and value.isprintable()):
        raise Reason.TOKEN_MISSING.error("the Authorization header is no bearer token", field="Authorization")
    return value


def readable(headers: Mapping[str, str]) -> None:
    """Raise FIELD_INVALID for a header that is not UTF-8: such a header cannot be forwarded or reported."""
    for name, value in headers.items():
        if not value.isascii() and any("\ud800" <= sign <= "\udfff" for sign in value):
            raise Reason.FIELD_INVALID.error(f"header {name} is no UTF-8", field=name)


def key(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the name and value of the caller's key header, or two empty texts. Raises FIELD_INVALID."""
    for name in KEYS:
        value = headers.get(name)
        if value is None:
            continue
        if not 0 < len(value) <= _LONGEST:
            raise Reason.FIELD_INVALID.error(f"header {name} must have 1 to {_LONGEST} characters", field=name)
        return name, value
    return "", ""


def as_uuid7(key: str) -> str:
    """Return a key that is a request id, in the contract's spelling; "" for any other key."""
    try:
        parsed = uuid.UUID(key)
    except ValueError:
        return ""
    return str(parsed) if parsed.version == 7 else ""


def body_digest(query: str, body: bytes) -> bytes:
    """Return the digest that identifies equal requests under one key."""
    digest = hashlib.sha256(query.encode() + b"\0")
    digest.update(body)
    return digest.digest()


async def reserved(fleet: AsyncFleet, scope: Sequence[str], body_sha256: bytes) -> str:
    """Return the request id that the coordinator keeps for a key, for all gateways and restarts.

    ``scope`` is the key with dialect, model, caller, method and path. Only the hash of ``scope`` is sent, because
    ``scope`` may contain a token. Raises REQUEST_ID_REUSED if the key came with a different body.
    """
    request = ReserveRequestIdRequest(key=hashlib.sha256(orjson.dumps(scope)).hexdigest(), body_sha256=body_sha256)
    response: ReserveRequestIdResponse = await fleet.connection.call("ReserveRequestId", request, _RESERVE_S)
    return response.request_id


def derived(request_id: str, step: str) -> str:
    """Derive the id of a step of a request: equal for a repeat, with the time of the request id."""
    digest = bytearray(hashlib.sha256(f"{request_id}/{step}".encode()).digest()[:16])
    digest[:6] = uuid.UUID(request_id).bytes[:6]
    digest[6] = 0x70 | digest[6] & 0x0F
    digest[8] = 0x80 | digest[8] & 0x3F
    return str(uuid.UUID(bytes=bytes(digest)))
