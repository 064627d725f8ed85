"""Exit codes for scripts.

A code answers two questions: did every target confirm, and if not, is the state known.
"""

from __future__ import annotations

import enum

from rlctl.contract import errors
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN
from rlctl.v1.results_pb2 import (
    OPERATION_STATE_CANCELLED,
    OPERATION_STATE_OK,
    OPERATION_STATE_PARTIAL,
    OPERATION_STATE_RUNNING,
    OPERATION_STATE_UNKNOWN,
    Operation,
)


class Exit(enum.IntEnum):
    """Exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PARTIAL = 3
    UNKNOWN = 4
    UNREACHABLE = 5
    TIMEOUT = 6
    CONFLICT = 7
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Exit.OK: "every target confirmed, or the operation was accepted with --is-async",
    Exit.FAILED: "failed, and the state is known; or the output could not be written",
    Exit.USAGE: "the command is wrong (bad options, or a name that does not exist), or its caller is not allowed",
    Exit.PARTIAL: "some targets confirmed, and the others are known not to have confirmed",
    Exit.UNKNOWN: "the outcome of at least one target is not known",
    Exit.UNREACHABLE: "the coordinator cannot be reached",
    Exit.TIMEOUT: "the time was up while waiting",
    Exit.CONFLICT: "refused: the fleet's state does not allow the call, or the caller has been fenced",
    Exit.INTERRUPTED: "ended by SIGINT (Ctrl-C)",
    Exit.TERMINATED: "ended by SIGTERM",
}

_BY_CLASS: dict[type[RlctlError], Exit] = {
    errors.InvalidRequest: Exit.USAGE,
    errors.NotFound: Exit.USAGE,
    errors.Unauthenticated: Exit.USAGE,
    errors.PreconditionFailed: Exit.CONFLICT,
    errors.Conflict: Exit.CONFLICT,
    errors.Fenced: Exit.CONFLICT,
    errors.Forbidden: Exit.USAGE,
    errors.DeadlineExceeded: Exit.TIMEOUT,
}

_BY_REASON = {
    Reason.UNREACHABLE: Exit.UNREACHABLE,
    Reason.LINK_LOST: Exit.UNREACHABLE,
    Reason.TLS_FAILED: Exit.UNREACHABLE,
    Reason.NO_ROUTABLE_STAGE: Exit.TIMEOUT,  # raised at the end of a wait for a routable stage
    Reason.CANCELLED: Exit.FAILED,
}

_BY_STATE: dict[int, Exit] = {
    OPERATION_STATE_OK: Exit.OK,
    OPERATION_STATE_RUNNING: Exit.OK,
    OPERATION_STATE_PARTIAL: Exit.PARTIAL,
    OPERATION_STATE_UNKNOWN: Exit.UNKNOWN,
    OPERATION_STATE_CANCELLED: Exit.FAILED,
}


def of_reason(reason: Reason) -> Exit:
    return _BY_REASON.get(reason) or _BY_CLASS.get(reason.exception, Exit.FAILED)


def of_error(error: RlctlError, *, mutating: bool) -> Exit:
    """Return the code of a failure. A change whose answer was lost may have happened: the outcome is unknown."""
    if isinstance(error, OperationFailed):
        return of_operation(error.operation)
    if mutating and error.outcome == OUTCOME_UNKNOWN:
        return Exit.UNKNOWN
    return of_reason(error.reason)


def of_operation(operation: Operation) -> Exit:
    if operation.state in _BY_STATE:
        return _BY_STATE[operation.state]
    reason = Reason.__members__.get(operation.error.reason, Reason.INTERNAL)
    return Exit.CONFLICT if of_reason(reason) is Exit.CONFLICT else Exit.FAILED
