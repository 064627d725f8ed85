"""Authentication: the source of the fleet's token, and the principal of a call."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from rlctl.contract.access import Method, method_of, refusal
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import ANONYMOUS, FLEET, Grant, Identity, Principal, Scope, calling
from rlctl.traces.context import TRACEPARENT, valid
from rlctl.transport.access_file import AccessFile, hash_of
from rlctl.transport.denials import Denials
from rlctl.transport.status import FIRST_S, abort
from rlctl.transport.tls import identity as tls

HEADER = "authorization"

ON_BEHALF_OF = "x-rlctl-on-behalf-of"
"""Principal of the gateway's caller. The access file of the called server has the principal's scopes."""

CLIENT, USER = "x-rlctl-client", "x-rlctl-user"
"""``NAME/VERSION`` of the calling program, and its ``user@host``, as stated by the caller."""

NEW_TOKEN = "If the clock is right, an admin of the fleet makes a new token: `rlctl tokens new NAME`."
"""Next step for an expired token."""

MOST_STATED = 128
"""Longest kept text of each, in characters."""


def load_token(environment: Mapping[str, str] = os.environ, *, file: str = "") -> str | None:
    """Return the token from a file, RLCTL_TOKEN_FILE or RLCTL_TOKEN, in this order, stripped; None if not set.

    Raises FIELD_INVALID for an unreadable file, for a blank token, and as :func:`sendable`: a typo must not switch the
    guard off.
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
    text = environment.get("RLCTL_TOKEN", "")
    if text and not text.strip():
        raise Reason.FIELD_INVALID.error("RLCTL_TOKEN is blank", field="token")
    return sendable(text.strip()) or None


def sendable(token: str) -> str:
    """Return the token. Raises FIELD_INVALID for a token that no call can carry."""
    if not _sendable(token):
        raise Reason.FIELD_INVALID.error("the token must have only printable ASCII characters", field="token")
    return token


def _sendable(token: str) -> bool:
    return token.isascii() and token.isprintable()


def token_variables(token: str | None) -> dict[str, str]:
    """Return the variables of a child process with this token, "" for no token; {} to keep its environment's token."""
    return {} if token is None else {"RLCTL_TOKEN": token, "RLCTL_TOKEN_FILE": ""}


_OF_ROLE = {
    tls.Role.COORDINATOR: Scope.FLEET,
    tls.Role.STAGE: Scope.FLEET,
    tls.Role.WORKER: Scope.FLEET,
    tls.Role.GATEWAY: Scope.GATEWAY,
}
"""Scopes of the fleet's own processes by the role in their certificates; entries in the access file take precedence.
Trainers and clients need an entry in the file.
"""


class Access:
    """Authenticates the callers of one server: the fleet's own token, and the principals of an access file."""

    def __init__(self, token: str | None, file: str = "") -> None:
        """``file``: path of the access file, or "". Raises FIELD_INVALID."""
        self._fleet = hash_of(token) if token else ""
        self._file = AccessFile(Path(file)) if file else None

    @property
    def guards(self) -> bool:
        """Return True if callers need a token, or a certificate of the access file."""
        return bool(self._fleet) or self._file is not None

    @property
    def fixed(self) -> bool:
        """Return True if a right to call lasts as long as the server."""
        return self._file is None

    @property
    def revision(self) -> int:
        """Return a number that grows when an authenticated caller may have lost the right to call."""
        if self._file is None:
            return 0
        self._file.refresh()
        return self._file.revision

    def authenticate(
        self, metadata: Mapping[str, Any], certificate: tls.Identity | None = None, host: str = ""
    ) -> Identity:
        """Return the identity of a call from ``host``, from its metadata or headers and the caller's certificate.

        A token takes precedence over the certificate. Raises TOKEN_MISSING, TOKEN_INVALID, and SCOPE_MISSING for a
        caller that speaks for another principal without the scope ``gateway``.
        """
        principal = self._principal(metadata, certificate)
        via, on_behalf_of = "", str(metadata.get(ON_BEHALF_OF, ""))
        if on_behalf_of and self.guards:
            via, principal = principal.name, self._spoken_for(principal, on_behalf_of)
        client, _, version = str(metadata.get(CLIENT, ""))[:MOST_STATED].partition("/")
        user, traceparent = str(metadata.get(USER, ""))[:MOST_STATED], valid(metadata.get(TRACEPARENT))
        return Identity(principal, via, client, version, user, host, traceparent)

    def _principal(self, metadata: Mapping[str, Any], certificate: tls.Identity | None) -> Principal:
        if not self.guards:
            return ANONYMOUS if certificate is None else Principal(certificate.path, ANONYMOUS.grants)
        scheme, _, token = str(metadata.get(HEADER, "")).partition(" ")
        token = token.strip()
        if scheme.lower() == "bearer" and token:
            if not _sendable(token):
                raise Reason.TOKEN_INVALID.error("the token must have only printable ASCII characters")
            principal = self._file.of_token(token) if self._file is not None else None
            if principal is not None:
                return principal
            # Hashes are compared, so that the time of a comparison says nothing of the token.
            if self._fleet and hmac.compare_digest(hash_of(token), self._fleet):
                return FLEET
            if self._file is not None and (expired := self._file.expiry(token)):
                raise Reason.TOKEN_INVALID.error(expired, next_step=NEW_TOKEN)
            raise Reason.TOKEN_INVALID.error()
        if certificate is None or self._file is None:
            raise Reason.TOKEN_MISSING.error()
        principal = self._file.of_certificate(str(certificate))
        if principal is not None:
            return principal
        if certificate.role in _OF_ROLE:
            return Principal(certificate.path, frozenset({Grant(_OF_ROLE[certificate.role])}))
        raise Reason.TOKEN_MISSING.error(f"no token was sent, and the access file does not have {certificate}")

    def _spoken_for(self, speaker: Principal, name: str) -> Principal:
        if not speaker.has(Scope.GATEWAY):
            raise Reason.SCOPE_MISSING.error(
                f"{speaker.name} may not call in the name of {name!r}: it needs gateway",
                metadata={"principal": speaker.name, "needs": Scope.GATEWAY.value},
            )
        principal = self._file.of_name(name) if self._file is not None else None
        if principal is None:
            raise Reason.TOKEN_INVALID.error(f"{speaker.name} speaks for {name!r}, which the access file does not have")
        if principal.has(Scope.GATEWAY):
            raise Reason.SCOPE_MISSING.error(f"{speaker.name} may not speak for {name}, a process of the fleet")
        return principal


def _host(peer: str) -> str:
    """Return the host of a gRPC address, ``ipv4:127.0.0.1:5080``."""
    return peer if peer.startswith("unix") else peer.partition(":")[2].rpartition(":")[0]


OPEN = "/grpc.health.v1.Health/Check"
"""The only method without a token: probes of a cluster have no token. It tells only whether a process serves."""


def admit(
    access: Access,
    method: Method,
    metadata: Mapping[str, Any],
    host: str,
    denials: Denials,
    certificate: tls.Identity | None = None,
) -> Identity:
    """Return the identity of a call from ``host``, checked as far as possible before its request is read.

    Raises the refusal after noting it: TOKEN_MISSING, TOKEN_INVALID, SCOPE_MISSING.
    """
    identity = None
    try:
        identity = access.authenticate(metadata, certificate, host)
        if (refused := refusal(identity.principal, method)) is not None:
            raise refused
    except RlctlError as error:
        denials.note(identity, method, error, host)
        raise
    return identity


class AccessGuard(grpc.aio.ServerInterceptor):
    """Authenticates every call of every service, and refuses calls beyond the scopes of the principal.

    Checks that depend on the request are made by the service, with :func:`rlctl.contract.access.refusal` again.
    """

    def __init__(
        self,
        access: Access,
        denials: Denials,
        certificate_of: Callable[[grpc.aio.ServicerContext[Any, Any]], tls.Identity | None],
    ) -> None:
        """``certificate_of``: the identity in the certificate of a call, or None."""
        self.access = access
        self._denials = denials
        self._certificate_of = certificate_of

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if handler_call_details.method == OPEN:
            return _opened(handler)
        metadata = {key.lower(): value for key, value in handler_call_details.invocation_metadata or ()}
        return _guarded(handler, _Admission(self, metadata, method_of(handler_call_details.method)))

    def admit(
        self, metadata: Mapping[str, Any], method: Method, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Identity:
        certificate = None if HEADER in metadata else self._certificate_of(context)  # a token takes precedence
        return admit(self.access, method, metadata, _host(context.peer() or ""), self._denials, certificate)


class Standing:
    """The right of a call, checked again when the access file changes during the call."""

    def __init__(self, access: Access, admit: Callable[[], object]) -> None:
        """``admit``: raises the refusal of a call that has lost its right. Construct before the first check."""
        self._access = access
        self._admit = admit
        self._revision = access.revision

    def check(self) -> None:
        """Raise the refusal. Cheap: the file is checked once a second."""
        revision = self._access.revision
        if revision != self._revision:
            self._revision = revision
            self._admit()


class _Admission:
    """The admission of a call.

    Attributes:
        identity: of the caller, as last admitted.
    """

    def __init__(self, guard: AccessGuard, metadata: Mapping[str, Any], method: Method) -> None:
        self.identity: Identity | None = None
        self._guard = guard
        self._metadata = metadata
        self._method = method

    @property
    def lasts(self) -> bool:
        """Return True if the right lasts as long as the call."""
        return self._guard.access.fixed

    def enter(self, context: grpc.aio.ServicerContext[Any, Any]) -> Standing:
        """Admit the call; further work of the task runs in its name. Raises the refusal."""
        standing = Standing(self._guard.access, lambda: self._admit(context))
        self._admit(context)
        calling.set(self.identity)
        return standing

    def _admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.identity = self._guard.admit(self._metadata, self._method, context)


class _CheckedContext:
    """The context of a stream, with a check of the call's right before each write."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], standing: Standing) -> None:
        self._context = context
        self._standing = standing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, answer: Any) -> None:
        self._standing.check()
        await self._context.write(answer)


def _opened(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await _answer(handler, request, context)

    return grpc.unary_unary_rpc_method_handler(unary, None, handler.response_serializer)


def _guarded(handler: Any, admission: _Admission) -> grpc.RpcMethodHandler[Any, Any]:
    async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await _enter(admission, context)
        return await _answer(handler, request, context)

    async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        standing = await _enter(admission, context)
        checked: Any = context if admission.lasts else _CheckedContext(context, standing)
        await _relay(lambda: handler.unary_stream(_parsed(handler, request), checked), checked)

    async def streams(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        standing = await _enter(admission, context, requests)
        checked: Any = context
        if not admission.lasts:
            requests, checked = _checked(requests, standing, admission), _CheckedContext(context, standing)
        await _relay(lambda: handler.stream_stream(_all_parsed(handler, requests), checked), checked)

    write = handler.response_serializer
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(streams, None, write)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, None, write)
    return grpc.unary_unary_rpc_method_handler(unary, None, write)


async def _answer(handler: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """Return the answer of a unary handler. gRPC's own services, for example health, raise these errors."""
    try:
        return await handler.unary_unary(_parsed(handler, request), context)
    except RlctlError as error:
        await abort(context, error)
    except NotImplementedError:
        await abort(context, Reason.VERB_UNKNOWN.error("the installed version of gRPC does not have this method"))


def _parsed(handler: Any, request: Any) -> Any:
    """Parse a request, unless the handler parses it. gRPC itself would log a traceback and answer UNKNOWN."""
    if handler.request_deserializer is None:
        return request
    try:
        return handler.request_deserializer(request)
    except DecodeError as error:
        raise Reason.FIELD_INVALID.error(f"the request cannot be parsed: {error}") from None


def _all_parsed(handler: Any, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    if handler.request_deserializer is None:
        return requests

    async def parsed() -> AsyncIterator[Any]:
        async for request in requests:
            yield _parsed(handler, request)

    return parsed()


async def _enter(
    admission: _Admission,
    context: grpc.aio.ServicerContext[Any, Any],
    requests: AsyncIterator[Any] | None = None,
) -> Standing:
    try:
        return admission.enter(context)
    except RlctlError as error:
        if requests is not None:
            # Wait for the first message. If a call ends while a Python client writes, the client learns of the end, but
            # sometimes not of the reason (``_StreamRequestMixin._write``, 1.85).
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_S):
                    await anext(aiter(requests), None)
        await abort(context, error)


async def _relay(start: Callable[[], Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Write the messages that a handler yields. A handler that is a coroutine writes by itself."""
    try:
        answers = start()
        if not inspect.isasyncgen(answers):
            await answers
            return
        async with contextlib.aclosing(answers):
            async for answer in answers:
                await context.write(answer)
    except RlctlError as error:
        await abort(context, error)


async def _checked(requests: AsyncIterator[Any], standing: Standing, admission: _Admission) -> AsyncIterator[Any]:
    async for request in requests:
        standing.check()  # an error ends the stream
        calling.set(admission.identity)  # the access file may have given the principal another quota
        yield request
