"""The data port: an HTTP listener on the event loop of generation."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TypeVar
from urllib.parse import quote

import orjson
from aiohttp import web

from rlctl.contract.access import Method
from rlctl.contract.errors import Reason, RlctlError, without_frames
from rlctl.contract.scopes import Scope, calling
from rlctl.engine import Engine, HttpExchange, HttpHead, HttpRequest, HttpRoute
from rlctl.ports import Clock
from rlctl.runtime import http_errors, http_limits
from rlctl.runtime.addresses import join, refuse_insecure, split
from rlctl.runtime.http_bodies import Bodies, Body
from rlctl.runtime.http_forwarding import SEQUENCE, SLOT, VERSION, WAIT, end_to_end, min_version
from rlctl.stage.data_port.admission import Admission
from rlctl.stage.generation.gate_watch import Ongoing, OngoingRequest
from rlctl.stage.serving_state import Serving
from rlctl.transport.auth import Access, Standing, admit
from rlctl.transport.denials import Denials
from rlctl.transport.quotas import Quotas
from rlctl.transport.tls.credentials import Tls, http_identity
from rlctl.transport.tls.identity import DATA_PORT

log = logging.getLogger(__name__)

_of_aiohttp = logging.getLogger(f"{__name__}.aiohttp")
_of_aiohttp.setLevel(logging.CRITICAL)  # a traceback for every request that is not HTTP

BODY_BYTES = 64 << 20
"""Most bytes of a body: a batch of long prompts as token ids, or of images."""

WAIT_S = 30.0
MOST_WAIT_S = 600.0
"""Default and longest wait of a request for the gate, in seconds: longer than most pauses of an update."""

ANSWER_S = 3600.0
"""Longest time of an answer, in seconds."""

OPEN_S = 60.0
"""Longest silence of the engine at a route without the gate, in seconds."""

LAST_S = 0.5
"""Longest time in which clients receive the error of their requests when the stage ends, in seconds."""

_HEALTH = ("/health", "/health_generate", "/ready")
"""Answered by the gate: health checks for a proxy in front of the stages."""

_NOT_PASSED = frozenset(
    {
        *("host", "content-length", "content-encoding", "accept-encoding", "expect"),
        *("authorization", "cookie", "x-api-key"),
    }
)
"""Headers that the stage writes itself, and credentials."""

_OWN = "x-rlctl-"

_NUMBER = re.compile(r"\d{1,18}(\.\d{1,6})?", re.ASCII)
_PRINTABLE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Characters of a label, besides letters and digits, that a header carries unchanged. The rest is %-encoded."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DataPort:
    """Passes requests on to the engine of one stage."""

    def __init__(
        self,
        engine: Callable[[], Engine],
        serving: Callable[[], Serving],
        clock: Clock,
        *,
        quotas: Quotas | None = None,
        token: str | None = None,
        access_file: str = "",
        insecure: bool = False,
        tls: Tls | None = None,
    ) -> None:
        """``engine`` returns the running engine, ``serving`` the present state of the stage.

        ``quotas``: those of the stage, shared with RolloutService; ``tls``: that of the stage.
        """
        self._tls = tls
        self._engine = engine
        self._serving = serving
        self._clock = clock
        self._token = token or access_file or None
        self._access = Access(token, access_file)
        self._denials = Denials()
        self._quotas = quotas or Quotas(self._denials)
        self._insecure = insecure
        self._admission = Admission(serving, clock)
        self._ongoing = Ongoing(serving, clock)
        self._waiting: set[OngoingRequest] = set()
        self._forwarded: set[OngoingRequest] = set()  # at routes without the gate
        self._bodies = Bodies(BODY_BYTES)
        self._ends = False
        self._runner: web.AppRunner | None = None
        self._site: http_limits.Site | None = None
        self._routes: list[str] = []

    async def start(self, listen: str, routes: Iterable[HttpRoute]) -> str:
        """Listen and return the address. Raises INSECURE_BIND, FIELD_INVALID."""
        refuse_insecure(listen, token=self._token, insecure=self._insecure or self._tls is not None)
        host, port = split(listen, "data_listen")
        app = web.Application(middlewares=[self._outermost], client_max_size=BODY_BYTES)
        for path in _HEALTH:
            app.router.add_get(path, self._health, allow_head=True)
        for route in routes:
            name = f"{route.method} {route.path}"
            if name not in self._routes:
                self._routes.append(name)
                app.router.add_route(route.method, route.path, self._gated if route.gated else self._open)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_of_aiohttp,
            keepalive_timeout=http_limits.IDLE_S,
            shutdown_timeout=http_limits.CUT_S,
        )
        await self._runner.setup()
        context = None if self._tls is None else self._tls.server_context(mutual=True)
        self._site = http_limits.Site(self._runner, host, port, ssl_context=context)
        await self._site.start()
        return join(host, self._runner.addresses[0][1])

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new and waiting requests, let forwarded ones finish within ``grace_s`` seconds, and end the rest."""
        self._ends = True
        for waiting in self._waiting:
            waiting.cut(_ending())
        if self._site is not None and self._runner is not None:
            await self._site.drain(max(grace_s - LAST_S - 2 * http_limits.CUT_S, 0.0))
            self._ongoing.cut(_ending())
            for forwarded in self._forwarded:
                forwarded.cut(_ending())
            await self._site.drain(LAST_S)
            await self._runner.cleanup()

    @web.middleware
    async def _outermost(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if self._tls is not None:
                self._refuse_peer(self._tls, request)
            if self._ends:
                raise _ending()
            if request.path not in _HEALTH:
                self._admit(request)
            return await handler(request)
        except web.HTTPException as said:
            if said.status not in (404, 405):
                raise
            without_frames(said)
            return _refusal(self._closed(request, said.status))
        except RlctlError as error:
            return _refusal(without_frames(error))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            log.error("%s %r", request.method, request.path, exc_info=error)
            return _refusal(Reason.INTERNAL.error("the stage failed; its log says more"))

    @staticmethod
    def _refuse_peer(tls: Tls, request: web.Request) -> None:
        """Raise PEER_NOT_ALLOWED."""
        if (refusal := tls.http_refusal(request.transport, DATA_PORT)) is not None:
            raise refusal

    def _admit(self, request: web.Request) -> None:
        """Admit a request; further work of the task runs in its name.

        Raises TOKEN_MISSING, TOKEN_INVALID, SCOPE_MISSING.
        """
        method = Method(_route(request), (Scope.ROLLOUT,))
        certificate = http_identity(request.transport) if self._tls is not None else None
        calling.set(admit(self._access, method, request.headers, request.remote or "", self._denials, certificate))

    def _closed(self, request: web.Request, status: int) -> RlctlError:
        error = Reason.VERB_UNKNOWN.error(
            f"the data port does not pass {request.method} {request.path} to the engine",
            next_step=f"Routes: {', '.join(self._routes)}. The coordinator does weights, memory and pauses.",
        )
        error.http_status = status
        return error

    async def _health(self, request: web.Request) -> web.StreamResponse:  # noqa: ARG002
        serving = self._serving()
        serving.refuse(self._clock)
        return web.Response(headers=_version_headers(serving))

    async def _open(self, request: web.Request) -> web.StreamResponse:
        """Forward a request with an answer that does not depend on the weights."""
        serving = self._serving()
        with closing(Body(request, self._bodies)) as body:
            with self._wait():
                exchange = await self._engine().exchange(await self._read(request, body, gated=False))
                serving.refuse_model(exchange.model)
            with closing(exchange), self._listed(self._forwarded) as forwarded:
                head = await _in_time(forwarded, exchange.begin)
                body.close()  # the engine has read the body
                return await _answer(request, head, {}, functools.partial(_in_time, forwarded, exchange.read))

    async def _gated(self, request: web.Request) -> web.StreamResponse:
        """Forward a request that the engine computes with its weights."""
        standing = Standing(self._access, lambda: self._admit(request))  # admitted just now
        with self._quotas.places(), closing(Body(request, self._bodies)) as body:
            exchange, serving = await self._admitted(request, body)
            ongoing = self._ongoing.begin(self._clock.now() + ANSWER_S, exchange.adapter)
            try:
                with closing(exchange):
                    head = await _checked(ongoing, standing, exchange.begin)
                    body.close()  # the engine has read the body
                    read = functools.partial(_checked, ongoing, standing, exchange.read)
                    return await _answer(request, head, _version_headers(serving), read)
            finally:
                self._ongoing.end(ongoing)

    async def _admitted(self, request: web.Request, body: Body) -> tuple[HttpExchange, Serving]:
        """Return the request as read by the engine, once the gate has admitted it."""
        least, wait_s = min_version(request.headers), _wait_s(request)
        with self._wait():
            passed = await self._read(request, body, gated=True)
            while True:
                engine = self._engine()
                exchange = await engine.exchange(passed)
                serving = await self._admission.admit(
                    wait_s,
                    model=exchange.model,
                    min_version_seq=least,
                    adapter=exchange.adapter,
                )
                if self._engine() is engine:  # otherwise the engine was restarted meanwhile
                    return exchange, serving

    @contextmanager
    def _wait(self) -> Iterator[None]:
        """Wait before a request is forwarded. Raises STAGE_NOT_SERVING once the stage ends."""
        if self._ends:
            raise _ending()
        with self._listed(self._waiting) as waiting, waiting:
            yield

    @contextmanager
    def _listed(self, requests: set[OngoingRequest]) -> Iterator[OngoingRequest]:
        """List a request that the end of the stage ends."""
        request = OngoingRequest(self._serving, self._clock, math.inf, "")
        requests.add(request)
        try:
            yield request
        finally:
            requests.discard(request)

    async def _read(self, request: web.Request, body: Body, *, gated: bool) -> HttpRequest:
        data = await body.read()
        document = await self._bodies.parse(data) if data and not data.isspace() else None
        passed = end_to_end(request.headers, _NOT_PASSED)
        headers = [(name, value) for name, value in passed if not name.lower().startswith(_OWN)]
        return HttpRequest(request.method, _target(request), headers, data, document, gated)


def _ending() -> RlctlError:
    return Reason.STAGE_NOT_SERVING.error("the stage ends")


def _route(request: web.Request) -> str:
    """Return the route's name for logs. A path comes from a caller that may have no right to write there."""
    resource = request.match_info.route.resource
    return "unknown route" if resource is None else f"{request.method} {resource.canonical}"


def _target(request: web.Request) -> str:
    """Return path and query for the engine. The path is that of the route, in canonical form."""
    route = request.match_info.route.resource
    assert route is not None
    path = route.canonical
    if request.match_info:
        path = path.format_map({name: quote(value, safe="") for name, value in request.match_info.items()})
    _, mark, query = request.raw_path.partition("?")
    return path + mark + query


def _wait_s(request: web.Request) -> float:
    """Return the longest wait for the gate, in seconds. Raises FIELD_INVALID."""
    value = request.headers.get(WAIT)
    if value is None:
        return WAIT_S
    if not _NUMBER.fullmatch(value):
        raise Reason.FIELD_INVALID.error(f"{value!r} is not a number of at least 0", field=WAIT)
    return min(float(value), MOST_WAIT_S)


def _version_headers(serving: Serving) -> dict[str, str]:
    version = serving.version
    return {SLOT: serving.slot, VERSION: quote(version.label, safe=_PRINTABLE), SEQUENCE: str(version.sequence)}


async def _checked(ongoing: OngoingRequest, standing: Standing, read: Callable[[], Awaitable[T]]) -> T:
    """Return a part of an answer. Check the gate and the caller's right before it is passed on."""
    part = await ongoing.within(read)
    standing.check()
    return part


async def _in_time(forwarded: OngoingRequest, read: Callable[[], Awaitable[T]]) -> T:
    """Return a part of an answer. Raises DEADLINE_EXCEEDED after OPEN_S, STAGE_NOT_SERVING at the end of the stage."""
    try:
        with forwarded:
            async with asyncio.timeout(OPEN_S):
                return await read()
    except TimeoutError:
        raise Reason.DEADLINE_EXCEEDED.error(
            f"the engine has sent nothing for {OPEN_S:g} s", next_step="Send the request again."
        ) from None


async def _answer(
    request: web.Request, head: HttpHead, own: Mapping[str, str], read: Callable[[], Awaitable[bytes]]
) -> web.StreamResponse:
    """Send an answer. Raises the error of the first piece."""
    headers = [*head.headers, *own.items()]
    if head.body is not None:
        return web.Response(status=head.status, headers=headers, body=head.body)
    response = web.StreamResponse(status=head.status, headers=headers)
    piece = await read()  # before the head is sent: an error becomes a refusal, and a gateway can use another stage
    await response.prepare(request)
    try:
        while piece:
            await response.write(piece)
            piece = await read()
    except RlctlError as error:
        if response.content_type == "text/event-stream":
            await response.write(b"data: " + orjson.dumps(http_errors.body_of(without_frames(error))) + b"\n\n")
        if request.transport is not None:
            request.transport.close()  # without the last chunk, so that no client takes the answer as complete
        return response
    await response.write_eof()
    return response


def _refusal(error: RlctlError) -> web.Response:
    """Return an error response of the stage itself."""
    headers = {**http_errors.headers_of(error), http_errors.REASON: error.reason.name}
    return web.Response(
        status=error.http_status,
        body=orjson.dumps(http_errors.body_of(error)),
        headers=headers,
        content_type="application/json",
    )
