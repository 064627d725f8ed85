"""Errors as HTTP answers."""

from __future__ import annotations

from typing import Any

from rlctl import errors
from rlctl.errors import RlctlError

_STATUS: dict[type[RlctlError], int] = {
    errors.InvalidRequest: 400,
    errors.NotFound: 404,
    errors.PreconditionFailed: 400,  # as SGLang answers: busy, not paused, not there
    errors.Conflict: 409,
    errors.Fenced: 403,
    errors.Unauthenticated: 401,
    errors.Exhausted: 413,
    errors.Unsupported: 501,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 504,
}


def status_of(error: RlctlError) -> int:
    """The HTTP status."""
    return _STATUS.get(type(error), 500)


def described(error: RlctlError) -> dict[str, Any]:
    """Its reason, field, cause and next step."""
    return {
        "message": str(error),
        "reason": error.reason.name,
        "field": error.field,
        "cause": error.message,
        "next_step": error.next_step,
        "code": status_of(error),
    }
