"""Errors on the wire: RlctlError ⇄ gRPC status with one google.rpc.ErrorInfo."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from rlctl.contract.errors import DOMAIN, Reason, RlctlError, from_detail, without_frames
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, ErrorDetail

FIRST_S = 1.0
"""Wait for the first message of a refused stream, seconds."""

DETAILS_KEY = "grpc-status-details-bin"

MAX_VALUE = 500
"""Characters of one metadata value in a status: trailers have little room. Results carry whole values."""

MAX_MESSAGE = 1500
"""Bytes of a status message. Trailers contain the message twice, once with three bytes for each non-ASCII byte."""

# Keys of ErrorInfo.metadata that carry the parts of an ErrorDetail.
_FIELD, _NEXT_STEP = "field", "next_step"

_NOT_GRPC = "Received http2 header with status"
"""Start of gRPC's text for an answer of a web server or proxy."""

_TOO_LARGE_ANSWERS = ("CLIENT: Received message larger", "SERVER: Sent message larger")
"""Starts of gRPC's texts for an answer that is too large: the request was carried out."""

_ENDED = "Internal error from Core"
"""Text of Python's gRPC for a write to a call that had ended for any reason."""


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RlctlError) -> NoReturn:
    without_frames(error)
    metadata = {key: value[:MAX_VALUE] for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason.name, domain=DOMAIN, metadata=metadata)
    if error.field:
        info.metadata[_FIELD] = error.field[:MAX_VALUE]
    if error.next_step:
        info.metadata[_NEXT_STEP] = error.next_step
    packed = any_pb2.Any()
    packed.Pack(info)
    message = str(error).encode(errors="replace")[:MAX_MESSAGE].decode(errors="ignore")
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=message, details=[packed])
    await context.abort(grpc.StatusCode[error.status], message, ((DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returns never")


def from_grpc(error: grpc.RpcError) -> RlctlError:
    """Return the error of a failed call. A status without rlctl's ErrorInfo is translated by its code.

    The outcome is REJECTED if the server refused, and UNKNOWN if the call may have arrived.
    """
    code: grpc.StatusCode = error.code()
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == DETAILS_KEY:
            info = error_details_pb2.ErrorInfo()
            status = status_pb2.Status.FromString(value)
            if status.details and status.details[0].Unpack(info) and info.domain == DOMAIN:
                metadata = dict(info.metadata)
                detail = ErrorDetail(
                    reason=info.reason,
                    field=metadata.pop(_FIELD, ""),
                    next_step=metadata.pop(_NEXT_STEP, ""),
                    metadata=metadata,
                )
                detail.message = _cause(status.message, detail)
                return from_detail(detail)
    details = error.details() or code.name
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return Reason.UNREACHABLE.error(details, outcome=OUTCOME_UNKNOWN)
        case grpc.StatusCode.INTERNAL if details == _ENDED:
            return Reason.UNREACHABLE.error("the call ended without a reason", outcome=OUTCOME_UNKNOWN)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return Reason.DEADLINE_EXCEEDED.error(details, outcome=OUTCOME_UNKNOWN)
        case grpc.StatusCode.CANCELLED:
            return Reason.CANCELLED.error(details, outcome=OUTCOME_UNKNOWN)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            answer_too_large = any(sign in details for sign in _TOO_LARGE_ANSWERS)
            return Reason.MESSAGE_TOO_LARGE.error(
                details, outcome=OUTCOME_UNKNOWN if answer_too_large else OUTCOME_REJECTED
            )
        case grpc.StatusCode.UNIMPLEMENTED if details.startswith(_NOT_GRPC):
            # A 404: no gRPC server accepted the call, so the call is not retried.
            return Reason.UNREACHABLE.error(f"the peer is no gRPC server: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return Reason.VERB_UNKNOWN.error(details)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Reason.TOKEN_INVALID.error(details)
        case _:
            return Reason.INTERNAL.error(f"{code.name}: {details}", outcome=OUTCOME_UNKNOWN)


def _cause(message: str, detail: ErrorDetail) -> str:
    """Return the message without the decoration of ``str(RlctlError)``."""
    where = f" [{detail.field}]" if detail.field else ""
    message = message.removeprefix(f"{detail.reason}{where}: ")
    return message.removesuffix(f" {detail.next_step}").removesuffix(".") if detail.next_step else message
