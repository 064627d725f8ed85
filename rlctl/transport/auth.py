"""The bearer token: where it comes from, how servers check it. When set, it guards every service but a health check."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from rlctl.contract.errors import Reason, RlctlError
from rlctl.transport.status import abort

HEADER = "authorization"

FIRST_S = 1.0
"""How long a caller that is refused has for the first message of a stream."""


def load_token(environment: Mapping[str, str] = os.environ, *, file: str = "") -> str | None:
    """The token from a file, RLCTL_TOKEN_FILE or RLCTL_TOKEN, in this order, without space around it; None when none is
    set.

    Raises FIELD_INVALID for a file that cannot be read, for a token that is blank, and as :func:`sendable`: a typo must
    not switch the guard off.
    """
    path = file or environment.get("RLCTL_TOKEN_FILE", "")
    if path:
        try:
            token = Path(path).read_text().strip()
        except (OSError, UnicodeError) as error:
            raise Reason.FIELD_INVALID.error(f"the token file cannot be read: {error}", field="token_file") from error
        if not token:
            raise Reason.FIELD_INVALID.error(f"the token file {path} is empty", field="token_file")
        return sendable(token)
    given = environment.get("RLCTL_TOKEN", "")
    if given and not given.strip():
        raise Reason.FIELD_INVALID.error("RLCTL_TOKEN is blank", field="token")
    return sendable(given.strip()) or None


def sendable(token: str) -> str:
    """The token. Raises FIELD_INVALID for one that no call can carry."""
    if not (token.isascii() and token.isprintable()):
        raise Reason.FIELD_INVALID.error("the token has other than printable ASCII characters", field="token")
    return token


def token_variables(token: str | None) -> dict[str, str]:
    """What gives a process that is started this token, "" for none, whatever its environment says; {} where it is to
    go by that.
    """
    return {} if token is None else {"RLCTL_TOKEN": token, "RLCTL_TOKEN_FILE": ""}


def check(metadata: Mapping[str, str | bytes], token: str) -> RlctlError | None:
    """Why a caller is refused, or None. The comparison takes the same time wherever tokens differ."""
    scheme, _, given = str(metadata.get(HEADER, "")).partition(" ")
    if scheme.lower() != "bearer" or not given:
        return Reason.TOKEN_MISSING.error()
    if not hmac.compare_digest(given.strip().encode(), token.encode()):
        return Reason.TOKEN_INVALID.error()
    return None


OPEN = "/grpc.health.v1.Health/Check"
"""The one method that needs no token: probes of a cluster have none. It tells whether a process serves, and no more."""


class TokenGuard(grpc.aio.ServerInterceptor):
    """Refuses every call, of whatever service, that does not carry the token; but for :data:`OPEN`."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Let the call through, or answer it with the refusal."""
        metadata = {key.lower(): value for key, value in handler_call_details.invocation_metadata or ()}
        refusal = check(metadata, self._token)
        handler = await continuation(handler_call_details)
        if refusal is None or handler is None or handler_call_details.method == OPEN:
            return handler
        return _refuse(handler, refusal)


def _refuse(handler: grpc.RpcMethodHandler[Any, Any], refusal: RlctlError) -> grpc.RpcMethodHandler[Any, Any]:
    async def unary(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, refusal)

    async def stream(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await abort(context, refusal)
        yield

    async def streams(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        # Not before the first message is there: of a call that ends while a client of Python's writes, that hears that
        # it has ended, and now and then not why (``_StreamRequestMixin._write``, 1.85).
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await anext(aiter(requests), None)
        await abort(context, refusal)
        yield

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(streams)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(unary)
