"""Errors in HTTP answers: status, headers, and the JSON from which a client makes the typed error again."""

from __future__ import annotations

from typing import Any

from rlctl.contract.errors import Reason, RlctlError

REASON = "X-RLCTL-Reason"
"""Header of an answer that rlctl itself gives in place of an engine: the reason of its error."""

RETRY_S = {
    Reason.STAGE_NOT_SERVING: 1,
    Reason.VERSION_TOO_OLD: 1,
    Reason.NO_ROUTABLE_STAGE: 1,
    Reason.TOO_MANY_REQUESTS: 1,
    Reason.UPDATE_IN_PROGRESS: 1,
    Reason.OPERATION_CONFLICT: 1,
    Reason.UNREACHABLE: 1,
}
"""Reasons that are worth another try, and after how many seconds."""


def headers_of(error: RlctlError) -> dict[str, str]:
    """Retry-After where it is worth it, WWW-Authenticate where a token is missing or wrong."""
    headers = {}
    if error.reason in RETRY_S:
        headers["Retry-After"] = str(RETRY_S[error.reason])
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def body_of(error: RlctlError) -> dict[str, Any]:
    """The error as JSON: message, reason, field, cause, next step and code, and the names that OpenAI has for them."""
    return {"error": {**error.described(), "type": type(error).__name__, "param": error.field or None}}


def error_in(reason: str, body: Any) -> RlctlError:
    """The error of an answer with the header :data:`REASON`. INTERNAL for a reason that this version does not have."""
    given = body.get("error") if isinstance(body, dict) else None
    fields = given if isinstance(given, dict) else {}
    message, field = str(fields.get("cause") or fields.get("message") or reason), str(fields.get("field") or "")
    if reason not in Reason.__members__:
        return Reason.INTERNAL.error(f"{reason}: {message}", field=field)
    return Reason[reason].error(message, field=field)
