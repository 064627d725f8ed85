"""Errors in HTTP answers: status, headers, and the JSON from which a client rebuilds the typed error."""

from __future__ import annotations

from typing import Any

from rlctl.contract.errors import Reason, RlctlError

REASON = "X-RLCTL-Reason"
"""Header of an answer that comes from rlctl in place of an engine: the reason of the error."""

RETRY_S = {
    Reason.STAGE_NOT_SERVING: 1,
    Reason.VERSION_TOO_OLD: 1,
    Reason.NO_ROUTABLE_STAGE: 1,
    Reason.TOO_MANY_REQUESTS: 1,
    Reason.QUOTA_EXCEEDED: 1,
    Reason.UPDATE_IN_PROGRESS: 1,
    Reason.OPERATION_CONFLICT: 1,
    Reason.UNREACHABLE: 1,
}
"""Reasons that are worth a retry, with the wait in seconds."""


def headers_of(error: RlctlError) -> dict[str, str]:
    """Return Retry-After for reasons worth a retry, and WWW-Authenticate for a missing or wrong token."""
    headers = {}
    if error.reason in RETRY_S:
        headers["Retry-After"] = str(RETRY_S[error.reason])
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def body_of(error: RlctlError) -> dict[str, Any]:
    """Return the error as JSON: message, reason, field, cause, next step and code, and OpenAI's names of these."""
    return {"error": {**error.described(), "type": type(error).__name__, "param": error.field or None}}


def error_in(reason: str, body: Any) -> RlctlError:
    """Return the error of an answer with the header :data:`REASON`. INTERNAL if this version lacks the reason."""
    error_body = body.get("error") if isinstance(body, dict) else None
    fields = error_body if isinstance(error_body, dict) else {}
    message, field = str(fields.get("cause") or fields.get("message") or reason), str(fields.get("field") or "")
    next_step = fields.get("next_step")
    if not isinstance(next_step, str):
        next_step = ""
    if reason not in Reason.__members__:
        return Reason.INTERNAL.error(f"{reason}: {message}", field=field, next_step=next_step)
    return Reason[reason].error(message, field=field, next_step=next_step)
