"""A caller's session, given beside the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.gateway.http.call import Call

HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
FIELDS = ("session_id", "routing_key")
LONGEST = 8192
"""Longest session name in characters: the limit of a header."""


def named(call: Call, *bodies: Mapping[str, Any]) -> str:
    """Return the session from the body or the headers; "" without a session. Raises FIELD_INVALID."""
    for body in bodies:
        for name in FIELDS:
            value = body.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise Reason.FIELD_INVALID.error(f"{name} must be a text", field=name)
            if len(value) > LONGEST:  # kept with the session, and sent with each sample
                raise Reason.FIELD_INVALID.error(f"{name} must have at most {LONGEST} characters", field=name)
            if value:
                return value
    return next((call.headers[name] for name in HEADERS if call.headers.get(name)), "")
