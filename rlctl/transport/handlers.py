"""Server handlers built from a service's descriptor: parsing, size limit, deadline, errors, alike for every method.

A method of the service without an implementation answers UNIMPLEMENTED with a typed reason, never success.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from rlctl.contract.errors import Reason, RlctlError, typed
from rlctl.runtime import shielding
from rlctl.transport.channel import refuse_large
from rlctl.transport.status import abort

log = logging.getLogger(__name__)

Unary = Callable[[Message, float | None], Awaitable[Message]]
"""(request, seconds that the caller still waits) → answer. Goes on when the caller disconnects, unless cancellable."""

Streaming = Callable[[Message, float | None], AsyncIterator[Message]]
"""(request, seconds that the caller still waits) → answers. Closed when the caller disconnects."""

Bidirectional = Callable[[AsyncIterator[Message]], AsyncGenerator[Message, None]]
"""(requests) → answers. Closed when the caller disconnects."""


def generic_handler(
    service: ServiceDescriptor,
    implementations: Mapping[str, Unary | Streaming | Bidirectional],
    *,
    cancellable: bool = False,
    most_streams: Mapping[str, int] = MappingProxyType({}),
) -> grpc.GenericRpcHandler:
    """Return handlers for every method of a service.

    ``cancellable``: unary methods are cancelled when the caller disconnects (generation). Otherwise they are shielded,
    so that a deadline at the caller never leaves a half-applied command behind. ``most_streams``: by streaming method,
    most open streams of one host's callers.
    """
    handlers = {
        method.name: _handler(
            method, implementations.get(method.name), cancellable=cancellable, most=most_streams.get(method.name)
        )
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


class _Streams:
    """The open streams of a method, by the host of their callers."""

    def __init__(self, method: MethodDescriptor, most: int | None) -> None:
        self._method = method
        self._most = most
        self._open: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, peer: str) -> Iterator[None]:
        """Count one more stream within the block. Raises TOO_MANY_STREAMS."""
        host = peer if peer.startswith("unix") else peer.rpartition(":")[0]
        if self._most is not None and self._open[host] >= self._most:
            raise Reason.TOO_MANY_STREAMS.error(f"{self._most} streams of {self._method.name} are open from {host}")
        self._open[host] += 1
        try:
            yield
        finally:
            self._open[host] -= 1
            if not self._open[host]:
                del self._open[host]


def _handler(
    method: MethodDescriptor, implementation: Any, *, cancellable: bool, most: int | None
) -> grpc.RpcMethodHandler[Any, Any]:
    request_type = message_factory.GetMessageClass(method.input_type)
    if method.client_streaming:
        return _bidirectional(method, request_type, implementation)
    if method.server_streaming:
        return _streaming(method, request_type, implementation, _Streams(method, most))

    async def unary(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
        try:
            request = _parse(method, request_type, data, implementation)
            return await shielding.answer(implementation(request, _remaining(context)), cancellable=cancellable)
        except RlctlError as error:
            await abort(context, error)
        except Exception as error:
            log.exception("%s failed", method.full_name)
            await abort(context, typed(error))

    return grpc.unary_unary_rpc_method_handler(unary, response_serializer=_serialise)


def _streaming(
    method: MethodDescriptor, request_type: type[Message], implementation: Any, streams: _Streams
) -> grpc.RpcMethodHandler[Any, Any]:
    async def stream(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Message]:
        try:
            request = _parse(method, request_type, data, implementation)
            with streams.one(context.peer()):
                async for answer in implementation(request, _remaining(context)):
                    yield answer
        except RlctlError as error:
            await abort(context, error)
        except Exception as error:
            log.exception("%s failed", method.full_name)
            await abort(context, typed(error))

    return grpc.unary_stream_rpc_method_handler(stream, response_serializer=_serialise)


def _bidirectional(
    method: MethodDescriptor, request_type: type[Message], implementation: Any
) -> grpc.RpcMethodHandler[Any, Any]:
    async def stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            if implementation is None:
                raise _unimplemented(method)
            async with contextlib.aclosing(implementation(_messages(request_type, requests))) as answers:
                async for answer in answers:
                    await context.write(answer)
        except RlctlError as error:
            await abort(context, error)
        except Exception as error:
            log.exception("%s failed", method.full_name)
            await abort(context, typed(error))

    return grpc.stream_stream_rpc_method_handler(stream, response_serializer=_serialise)


def _parse(method: MethodDescriptor, request_type: type[Message], data: bytes, implementation: Any) -> Message:
    if implementation is None:
        raise _unimplemented(method)
    refuse_large(request_type.DESCRIPTOR.name, len(data))
    return _message(request_type, data)


def _message(request_type: type[Message], data: bytes) -> Message:
    try:
        return request_type.FromString(data)
    except DecodeError as error:
        raise Reason.FIELD_INVALID.error(
            f"the request is no {request_type.DESCRIPTOR.name}: {error}", field=request_type.DESCRIPTOR.name
        ) from None


async def _messages(request_type: type[Message], requests: AsyncIterator[bytes]) -> AsyncIterator[Message]:
    async for data in requests:  # lazily: gRPC warns of an iterator that was made and never read
        yield _message(request_type, data)


def _unimplemented(method: MethodDescriptor) -> RlctlError:
    return Reason.NOT_IMPLEMENTED.error(f"{method.full_name} is in the contract; its code does not exist yet")


def _serialise(message: Message) -> bytes:
    return message.SerializeToString()


def _remaining(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    remaining: float | None = context.time_remaining()
    return remaining
