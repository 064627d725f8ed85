"""Errors as HTTP says them. Dialects put them into their own words; status and facts come from here."""

from __future__ import annotations

from rlctl.contract.errors import Reason, RlctlError

RETRY_S = {
    Reason.STAGE_NOT_SERVING: 1,
    Reason.VERSION_TOO_OLD: 1,
    Reason.NO_ROUTABLE_STAGE: 1,
    Reason.TOO_MANY_REQUESTS: 1,
    Reason.UPDATE_IN_PROGRESS: 1,
    Reason.OPERATION_CONFLICT: 1,
    Reason.UNREACHABLE: 1,
}
"""What is worth another try, and after how many seconds."""


def headers_of(error: RlctlError) -> dict[str, str]:
    """Retry-After where it is worth it, WWW-Authenticate where a token is missing or wrong."""
    headers = {}
    if error.reason in RETRY_S:
        headers["Retry-After"] = str(RETRY_S[error.reason])
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
