"""The identity of a caller: read from the certificate of its connection, checked before a method runs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from rlctl.transport.status import FIRST_S, abort
from rlctl.transport.tls.identity import Identity, only_identity, refusal

_CALLER: ContextVar[Identity | None] = ContextVar("caller", default=None)


def peer_identity(context: grpc.aio.ServicerContext[Any, Any]) -> Identity | None:
    """Return the identity in the certificate of a call's peer; None without TLS or without exactly one identity."""
    uris = context.auth_context().get("peer_uri", ())
    return only_identity(uri.decode(errors="replace") for uri in uris)


def caller() -> Identity | None:
    """Return the identity of the running task's call; None without TLS."""
    return _CALLER.get()


class PeerGuard(grpc.aio.ServerInterceptor):
    """Refuses calls of identities without a right to the method. The last interceptor, next to the handlers."""

    def __init__(self, server: Identity) -> None:
        self._server = server
        self._guarded: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        name = handler_call_details.method
        if name not in self._guarded:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            self._guarded[name] = self._guard(name, handler)
        return self._guarded[name]

    def _guard(self, name: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        service, _, method = name.strip("/").rpartition("/")
        kind = f"{_kind(handler.request_streaming)}_{_kind(handler.response_streaming)}"
        behaviour = getattr(handler, kind)

        async def admit(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            identity = peer_identity(context)
            error = refusal(self._server, identity, service, method)
            if error is not None:
                if handler.request_streaming:
                    await _first(request)
                await abort(context, error)
            _CALLER.set(identity)

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await admit(request, context)
            return await behaviour(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await admit(request, context)
            async with contextlib.aclosing(behaviour(request, context)) as answers:
                async for each in answers:
                    yield each

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        guarded: grpc.RpcMethodHandler[Any, Any] = make(
            stream if inspect.isasyncgenfunction(behaviour) else answer,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return guarded


async def _first(requests: AsyncIterator[Any]) -> None:
    """Wait for the first message: Python's client may not hear why a call ended while it writes (1.85)."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIRST_S):
            await anext(aiter(requests), None)


def _kind(streaming: bool) -> str:
    return "stream" if streaming else "unary"
