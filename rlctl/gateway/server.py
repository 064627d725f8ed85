"""One listener with one dialect: routes requests to handlers, and drains at its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web
from multidict import CIMultiDict

from rlctl.contract.access import Method
from rlctl.contract.errors import Reason, RlctlError, without_frames
from rlctl.contract.scopes import calling
from rlctl.gateway import dialects
from rlctl.gateway.backend import generation_spans
from rlctl.gateway.backend.service import Generation, Settings
from rlctl.gateway.generation import passthrough
from rlctl.gateway.http import middleware
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Answer, Dialect, Handler, Reply, Route, Scope, Stream
from rlctl.gateway.router.process import SglangRouter
from rlctl.gateway.router.worker_list import Keeper, routed
from rlctl.metrics.definitions import refuse_without_library
from rlctl.runtime import http_limits
from rlctl.runtime.addresses import join, refuse_insecure, split
from rlctl.runtime.http_bodies import Bodies
from rlctl.runtime.shielding import shielded
from rlctl.sdk import aio
from rlctl.sdk.aio import AsyncFleet
from rlctl.traces.tracing import tracer
from rlctl.transport.access_file import make_token
from rlctl.transport.auth import Access, Standing, admit
from rlctl.transport.channel import OnBehalf
from rlctl.transport.denials import Denials
from rlctl.transport.quotas import Quotas
from rlctl.transport.tls.credentials import Tls, http_identity
from rlctl.transport.tls.identity import GATEWAY, Identity, Role

if TYPE_CHECKING:
    from rlctl.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

_of_aiohttp = logging.getLogger(f"{__name__}.aiohttp")
_of_aiohttp.setLevel(logging.CRITICAL)  # logs only invalid HTTP of callers, each time with a traceback

DRAIN_S = 30.0


@dataclass(frozen=True)
class GatewayConfig:
    """Configuration of a gateway process. Fields without an explanation are options of ``rlctl gateway``.

    Attributes:
        token: watches the fleet, and is required of callers. With None the fleet decides about each caller.
        access_file: further principals that may call. The fleet decides by their scopes, and needs its own tokens.
        insecure: other hosts may call without a token, and with TLS without a certificate.
        share_port: other processes listen on the port, too (SO_REUSEPORT).
        drain_s: longest time for running requests at the end of the gateway.
        warm: load tokenizers in the background at the start, instead of at the first request.
        router: an sglang-router, not started yet, to run in front of the gateway.
        tls: certificate of a gateway, for HTTPS and for the fleet; None for plain text.
    """

    coordinator: str
    dialect: str = "sglang"
    listen: str = "127.0.0.1:0"
    token: str | None = None
    access_file: str = ""
    insecure: bool = False
    middleware_paths: Sequence[str] = ()
    generation: Settings = field(default_factory=Settings)
    share_port: bool = False
    drain_s: float = DRAIN_S
    warm: bool = False
    router: SglangRouter | None = None
    tls: Tls | None = None
    metrics: str = ""


class GatewayServer:
    """A running gateway.

    Attributes:
        address: listening address, once started.
        fleet: the fleet behind the gateway.
        generation: generates samples for the routes.
        bodies: limits and parser of request bodies.
    """

    fleet: AsyncFleet
    generation: Generation
    dialect: Dialect
    bodies: Bodies

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.address = ""
        self._runner: web.AppRunner | None = None
        self._site: http_limits.Site | None = None
        self._keeper: Keeper | None = None
        self._denials = Denials()
        self._fleet: AsyncFleet | None = None
        self._generation: Generation | None = None
        self._lasting: set[asyncio.Task[Any]] = set()
        self._warming: asyncio.Task[None] | None = None
        self.metrics_address = ""
        self._metrics: GatewayMetrics | None = None

    async def start(self) -> None:
        """Connect and listen.

        Raises INSECURE_BIND, FIELD_INVALID, FIELD_CONFLICT, TLS_INVALID, TLS_FAILED, UNREACHABLE, TOKEN_MISSING,
        TOKEN_INVALID, and UNSUPPORTED if metrics are configured and prometheus_client is not installed.
        """
        config = self.config
        if config.tls is not None:
            config.tls.require(Role.GATEWAY)
            if config.router is not None:
                raise Reason.FIELD_CONFLICT.error(
                    "sglang-router does not speak TLS to this gateway", field="router_backend"
                )
        insecure = config.insecure or config.tls is not None
        refuse_insecure(config.listen, token=config.token or config.access_file or None, insecure=insecure)
        self._access = Access(config.token, config.access_file)
        host, port = split(config.listen, "listen")
        classes = [middleware.load(path) for path in config.middleware_paths]
        if config.metrics:
            refuse_without_library()
            from rlctl.gateway.metrics import GatewayMetrics  # loads prometheus_client

            self._metrics = GatewayMetrics(config.tls)
            self.metrics_address = await self._metrics.exposition.start(config.metrics)
        self.fleet = self._fleet = await aio.connect(
            config.coordinator, token=config.token or "", tls=config.tls or False, client="gateway"
        )
        await self.fleet.status()  # a gateway without access to the fleet is useless
        if config.access_file:
            await _refuse_unguarded(self.fleet)
        make_generation = Generation if self._metrics is None else self._metrics.generation
        self.generation = self._generation = make_generation(self.fleet, config.generation)
        self.generation.tracer = tracer("rlctl-gateway")
        self.generation.quotas = Quotas(self._denials, None if self._metrics is None else self._metrics.refused)
        self.dialect = dialects.load(config.dialect, self.generation)
        self.generation.any_model = self.dialect.any_model
        self.bodies = Bodies(self.dialect.body_bytes)
        self._middlewares = [middleware_class(self.generation) for middleware_class in classes]
        self._runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,
            access_log=None,
            logger=_of_aiohttp,
            keepalive_timeout=http_limits.IDLE_S,
            shutdown_timeout=http_limits.CUT_S,
        )
        await self._runner.setup()
        context = None if config.tls is None else config.tls.server_context(mutual=False)
        self._site = http_limits.Site(self._runner, host, port, share_port=config.share_port, ssl_context=context)
        await self._site.start()
        bound: socket.socket = self._runner.addresses[0]
        self.address = join(host, bound[1])  # type: ignore[index]
        if config.warm:
            self._warming = asyncio.create_task(self.generation.tokenizers.warm())
            self._warming.add_done_callback(_log_failure)
        if config.router is not None:
            self._keeper = Keeper(config.router, self.fleet, f"http://{self.address}", config.generation.model)
            await self._keeper.start()

    async def stop(self) -> None:
        """Stop accepting requests, let running requests end within ``drain_s``, and disconnect."""
        if self._warming is not None:
            self._warming.cancel()
        # At the same time: the router ends once the gateway has answered the router's requests.
        await asyncio.gather(
            *([self._keeper.stop(self.config.drain_s)] if self._keeper is not None else []),
            *([self._runner.cleanup()] if self._runner is not None else []),
        )
        if self._lasting:
            await asyncio.wait(self._lasting, timeout=self.config.drain_s)
        if self._metrics is not None:
            await self._metrics.exposition.stop()
        if self._generation is not None:
            self._generation.ports.close()
        if self._fleet is not None:
            await self._fleet.close()

    async def _drain(self, _: web.Application) -> None:
        """Wait for running requests. The listener is closed."""
        if self._site is not None:
            await self._site.drain(self.config.drain_s)

    def _application(self) -> web.Application:
        measured = [] if self._metrics is None else [self._metrics.request]
        app = web.Application(middlewares=[*measured, self._outermost], client_max_size=self.dialect.body_bytes)
        app.on_shutdown.append(self._drain)
        added: set[tuple[str, str]] = set()
        router = self.config.router
        router_routes = [] if router is None else routed(self.dialect.routes, pairs=router.pairs)
        for route in (*self.dialect.routes, *router_routes):
            handler = functools.partial(self._serve, route)
            for method in route.methods.split():
                if (method, route.path) not in added:
                    added.add((method, route.path))
                    app.router.add_route(method, route.path, handler)
        return app

    @web.middleware
    async def _outermost(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as said:
            if said.status not in (404, 405):
                raise
            without_frames(said)
            try:
                route = await passthrough.unlisted(self.generation, request.method, str(request.rel_url))
            except RlctlError as error:
                return _response(self.dialect.fail(without_frames(error)))
            if route is not None:
                return await self._serve(route, request)
            failure = Reason.VERB_UNKNOWN.error(f"there is no {request.method} {request.path} here")
            failure.http_status = said.status
            allowed = {name: value for name, value in said.headers.items() if name == "Allow"}
            return _response(self.dialect.fail(failure), allowed)

    async def _serve(self, route: Route, request: web.Request) -> web.StreamResponse:
        generation_spans.enter(request.path, request.headers)
        try:
            call = Call(
                request,
                self.fleet,
                self.generation,
                dialect=self.dialect.name,
                changes=route.scope is Scope.ADMIN,
                accepted=self.bodies,
            )
            admit = functools.partial(self._admit, route, call, request)
            standing = Standing(self._access, (lambda: None) if route.scope is Scope.OPEN else admit)
            answer = await self._answer(route, call, request)
            if isinstance(answer, Stream):
                return await self._stream(request, call, answer, standing)
            return _response(answer, call.notes)
        except RlctlError as error:
            answer = (route.fail or self.dialect.fail)(_of_the_request(route, without_frames(error)))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:  # noqa: BLE001 it is logged
            answer = self.dialect.fail(_defect(request, error))
        # A failed request may have unread fields, so its response lists no unknown fields.
        return _response(answer)

    def _admit(self, route: Route, call: Call, request: web.Request) -> None:
        """Admit a call; further work of the task runs in its name.

        Raises TOKEN_MISSING, TOKEN_INVALID, SCOPE_MISSING, PEER_NOT_ALLOWED.
        """
        certificate = self._certificate(request)
        method = Method(f"{route.methods} {route.path}", route.scope.needs)
        caller = admit(self._access, method, call.headers, request.remote or "", self._denials, certificate)
        calling.set(caller)
        if certificate is not None and self.config.access_file and call.token is None:
            call.act_for(OnBehalf(self.config.token or "", caller.principal.name))

    def _certificate(self, request: web.Request) -> Identity | None:
        """Return the identity of a caller that may use gateways.

        Raises PEER_NOT_ALLOWED for any other caller if only certificates guard the gateway: the gateway calls the fleet
        with its own certificate.
        """
        if self.config.tls is None:
            return None
        refused = self.config.tls.http_refusal(request.transport, GATEWAY)
        if refused is None:
            return http_identity(request.transport)
        if self._access.guards or self.config.insecure:
            return None
        raise refused

    async def _answer(self, route: Route, call: Call, request: web.Request) -> Answer:
        handler: Handler = route.handler
        if route.scope is not Scope.OPEN:
            # The gateway admits callers itself: not every route calls the fleet, a request may wait for a stage, and a
            # fleet without a token may have a gateway with a token.
            self._admit(route, call, request)
            if self.dialect.admit is not None:
                self.dialect.admit(call)
            handler = middleware.around(handler, self._middlewares)
        handler = _closing(handler)
        if route.scope is not Scope.ADMIN or not route.lasting:
            return await handler(call)
        # A disconnection does not interrupt a change half-way.
        await call.body()
        task = asyncio.ensure_future(handler(call))
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)
        return await shielded(task)

    async def _stream(self, request: web.Request, call: Call, answer: Stream, standing: Standing) -> web.StreamResponse:
        chunks = answer.chunks
        try:
            # A refused request gets an error response, not an event.
            first = await anext(chunks, b"")
            content_headers = (
                {"Cache-Control": "no-cache", "Content-Type": answer.content_type} if answer.content_type else {}
            )
            response = web.StreamResponse(status=answer.status, headers=_headers(answer, content_headers, call.notes))
            await response.prepare(request)
            await response.write(first)
            try:
                async for chunk in chunks:
                    standing.check()
                    await response.write(chunk)
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001 it is logged
                failure = without_frames(error) if isinstance(error, RlctlError) else _defect(request, error)
                if answer.fail is None:
                    raise ConnectionAbortedError(str(failure)) from None
                await response.write(answer.fail(failure))
            await response.write_eof()
            return response
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()


async def _refuse_unguarded(fleet: AsyncFleet) -> None:
    """Raise FIELD_CONFLICT if the coordinator accepts calls with any token: such a coordinator knows no scopes."""
    try:
        await fleet.on_behalf_of(make_token()).status()
    except RlctlError as error:
        if error.reason is Reason.TOKEN_INVALID:
            return
        raise
    raise Reason.FIELD_CONFLICT.error(
        "the gateway has an access file, and the coordinator accepts calls without a token: no scope would count",
        field="access_file",
        next_step="Start coordinator and stages with the access file too: --access-file or RLCTL_ACCESS_FILE.",
    )


def _closing(handler: Handler) -> Handler:
    async def answer(call: Call) -> Answer:
        with contextlib.closing(call):
            return await handler(call)

    return answer


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("no tokenizer was read at the start, only with the first request for one: %s", task.exception())


def _of_the_request(route: Route, error: RlctlError) -> RlctlError:
    """Set status 400 for an unsupported field or a rid in use of a generation request, as engines do.

    OpenAI's client retries a 501 and a 409.
    """
    unsupported = error.reason is Reason.UNSUPPORTED and error.field
    if route.scope is Scope.ROLLOUT and (unsupported or error.reason is Reason.RID_IN_USE):
        error.http_status = 400
    return error


def _defect(request: web.Request, error: Exception) -> RlctlError:
    log.error("%s %r", request.method, request.path, exc_info=error)
    without_frames(error)
    return Reason.INTERNAL.error("the gateway failed; its log says more")


def _response(answer: Answer, headers: dict[str, str] | None = None) -> web.Response:
    assert isinstance(answer, Reply)
    body, content_type = answer.body, answer.content_type
    if isinstance(body, str):
        body, content_type = body.encode(), content_type or "text/plain"
    elif body is not None and not isinstance(body, bytes):
        body, content_type = orjson.dumps(body), content_type or "application/json"
    content_headers = {"Content-Type": content_type or "application/octet-stream"}
    return web.Response(
        body=body or b"", status=answer.status, headers=_headers(answer, content_headers, headers or {})
    )


def _headers(answer: Answer, own: Mapping[str, str], notes: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers of a response, which precede the server's headers."""
    headers = CIMultiDict(answer.headers)
    for name, value in own.items():
        headers.setdefault(name, value)
    headers.update(notes)
    return headers
