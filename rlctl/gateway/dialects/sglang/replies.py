"""SGLang's replies for success and failure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from rlctl.contract.errors import OperationFailed, Reason, RlctlError, without_frames
from rlctl.gateway.http.dialect import Reply
from rlctl.gateway.http.table import RowCall
from rlctl.runtime.http_errors import headers_of
from rlctl.v1.common_pb2 import Outcome

_NAMES = {Reason.STAGE_NOT_FOUND, Reason.VERB_UNKNOWN}
"""Reasons for an unknown name in a URL. An unknown name in a body is an invalid body."""

_KEPT = {401, 403, 405, 408, 413, 429, 503, 504}


def status_of(error: RlctlError) -> int:
    """Return SGLang's status for an error: 400 for every error that SGLang would detect itself."""
    if error.http_status in _KEPT or error.reason in (Reason.INTERNAL, Reason.JOURNAL_FAILED):
        return error.http_status
    if error.reason in _NAMES and error.field in ("", "header.for_slot", "header.target.slots[0]"):
        return error.http_status
    return 400


def facts(error: RlctlError) -> dict[str, Any]:
    """Return the facts that SGLang has no field for: the typed reason, and the outcome of every engine."""
    details: dict[str, Any] = error.described()
    details["code"] = status_of(error)
    if isinstance(error, OperationFailed):
        details["operation_id"] = error.operation.operation_id
        details["engines"] = {
            result.slot: {
                "outcome": Outcome.Name(result.outcome).removeprefix("OUTCOME_"),
                "reason": result.error.reason,
                "message": result.error.message,
            }
            for result in error.operation.stage_results
        }
    return details


def refused(error: RlctlError) -> Reply:
    status = status_of(error)
    body = {
        "object": "error",
        "message": str(error),
        "type": HTTPStatus(status).phrase,
        "param": error.field or None,
        "code": status,
        "error": facts(error),
    }
    return Reply(body, status, headers_of(error))


def done(message: str, **more: Any) -> Reply:
    """Form ``{"success": true, "message": ...}``."""
    return Reply({"success": True, "message": message, **more})


def not_done(error: RlctlError, **more: Any) -> Reply:
    """Form ``{"success": false, "message": ...}``, as SGLang's weight verbs on failure."""
    status = status_of(error)
    return Reply({"success": False, "message": str(error), **more, "error": facts(error)}, status, headers_of(error))


def saying_success(
    **more: Any,
) -> Callable[[Callable[[RowCall], Awaitable[Reply]]], Callable[[RowCall], Awaitable[Reply]]]:
    """Decorate a handler so that its failures have ``success`` and the fields ``more``."""

    def wrap(handler: Callable[[RowCall], Awaitable[Reply]]) -> Callable[[RowCall], Awaitable[Reply]]:
        async def answer(row_call: RowCall) -> Reply:
            try:
                return await handler(row_call)
            except RlctlError as error:
                return not_done(without_frames(error), **more)

        answer.__doc__ = handler.__doc__
        return answer

    return wrap
