"""The HTTP server of the page, in the process and on the loop of the coordinator."""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import hashlib
import ipaddress
import json
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources

from aiohttp import web

from rlctl.cli.render import timeline
from rlctl.cli.web.content import Content
from rlctl.contract.access import Method
from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import Scope
from rlctl.coordinator.server import CoordinatorServer
from rlctl.runtime import http_limits
from rlctl.runtime.addresses import is_loopback, join, split
from rlctl.transport.auth import HEADER, Access, admit
from rlctl.transport.tls.credentials import http_identity
from rlctl.v1.coordinator_pb2 import GetOperationRequest

MOST_CONNECTIONS = 64
"""Connections at a time. Further connections are refused and closed."""

FRESH_S = 1.0
"""The state is made at most once in this time, for all open pages."""

MOST_ROWS = 50
"""Stages of a phase, and ranks of a stage, in a timeline."""

KEEP_S = 30.0
"""Time after which a connection without a request is closed: pages send a request every 2 s."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src data:"
_TIMELINE_POLICY = f"{_POLICY}; style-src 'unsafe-inline'"
"""The place of a bar is in an attribute ``style``. No script runs."""

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)

_aiohttp_log = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_log.setLevel(logging.CRITICAL)  # aiohttp logs a traceback for every invalid HTTP request

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebServer:
    """Serves the page of a coordinator."""

    def __init__(self, server: CoordinatorServer) -> None:
        """``server``: a started server. Raises FIELD_INVALID for an access file that cannot be read."""
        config = server.config
        self._server = server
        self._tls, self._insecure = config.tls, config.insecure
        self._access = Access(config.token, config.access_file)
        self._page, self._policy = _page()
        self._names = {"localhost", socket.gethostname().lower()}
        self._content = Content(server.coordinator, server.address)
        self._state = b""
        self._stale_at = 0.0
        self._making = asyncio.Lock()
        application = web.Application(middlewares=[self._outermost])
        application.router.add_get("/", self._get_page)
        application.router.add_get("/api/state", self._get_state)
        application.router.add_get("/operations/{id}", self._get_operation)
        self._runner = web.AppRunner(
            application, access_log=None, logger=_aiohttp_log, keepalive_timeout=KEEP_S, shutdown_timeout=1.0
        )

    async def start(self, listen: str) -> str:
        """Listen at ``host:port`` (port 0: any) and return the URL. Raises INSECURE_BIND, FIELD_INVALID."""
        host, port = split(listen, "web")
        if self._tls is None and not self._insecure and not is_loopback(host):
            raise Reason.INSECURE_BIND.error(
                f"{listen} is reachable from other hosts, and without TLS browsers send tokens as plain text",
                field="web",
                next_step="Set --tls-cert, --tls-key and --tls-ca, bind to 127.0.0.1, or say --insecure.",
            )
        self._names.add(host.lower())
        # Without tokens only the certificate of a caller can admit the caller.
        context = None if self._tls is None else self._tls.server_context(mutual=not self._access.guards)
        await self._runner.setup()
        site = http_limits.Site(self._runner, host, port, ssl_context=context)
        await site.start()
        scheme = "http" if context is None else "https"
        return f"{scheme}://{join(host, self._runner.addresses[0][1])}/"

    async def stop(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _outermost(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            if self._runner.server is None or len(self._runner.server.connections) > MOST_CONNECTIONS:
                answer: web.StreamResponse = web.Response(status=503, text="Too many connections.\n")
                answer.force_close()
            else:
                self._admit(request)
                answer = await handler(request)
        except RlctlError as error:
            answer = web.Response(status=error.http_status, text=f"{error}\n")
            if answer.status == 401:
                answer.headers["WWW-Authenticate"] = 'Basic realm="rlctl: any user, the token as password"'
        except web.HTTPException as error:
            answer = web.Response(status=error.status, text=f"{error.reason}\n")
        answer.headers.setdefault("Content-Security-Policy", _POLICY)
        answer.headers.update(_HEADERS)
        return answer

    def _admit(self, request: web.Request) -> None:
        """Raise the refusal of a caller that may not read the fleet."""
        certificate = http_identity(request.transport)
        if not self._access.guards and self._tls is not None:
            refused = self._tls.http_refusal(request.transport, "rlctl.v1.CoordinatorService")
            if refused is not None:
                raise refused
        elif not self._access.guards:
            self._refuse_foreign_name(request.host)
        if self._tls is None or (certificate is not None and certificate.fleet != self._tls.identity.fleet):
            certificate = None
        metadata = _metadata(request.headers)
        if self._access.guards and not metadata and certificate is None:
            raise Reason.TOKEN_MISSING.error()  # the first request of every browser: no denial for the audit
        resource = request.match_info.route.resource
        # The route, not the path: a caller could fill the audit with paths.
        method = Method(f"GET {resource.canonical if resource is not None else 'other'}", (Scope.VIEWER,))
        admit(self._access, method, metadata, request.remote or "", self._server.denials, certificate)

    def _refuse_foreign_name(self, host: str) -> None:
        """Raise PEER_NOT_ALLOWED for a host name that may not be this host's.

        A foreign page could resolve a name of its own to this address, and scripts of the page could then read the
        answers (DNS rebinding).
        """
        name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            if name.lower() not in self._names:
                raise Reason.PEER_NOT_ALLOWED.error(
                    f"the page of a fleet without tokens is not served under the name {name!r}",
                    next_step="Open it by its IP address or as localhost, or give the fleet a token.",
                ) from None

    async def _get_page(self, _request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": self._policy}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    async def _get_state(self, _request: web.Request) -> web.Response:
        async with self._making:
            if time.monotonic() >= self._stale_at:
                self._state = json.dumps(await self._content.state()).encode()
                self._stale_at = time.monotonic() + FRESH_S
        return web.Response(body=self._state, content_type="application/json")

    async def _get_operation(self, request: web.Request) -> web.Response:
        operation_request = GetOperationRequest(operation_id=request.match_info["id"])
        operation = await self._server.coordinator.get_operation(operation_request)
        text = await asyncio.to_thread(timeline.page, operation, MOST_ROWS)
        headers = {"Content-Security-Policy": _TIMELINE_POLICY}
        return web.Response(text=text, content_type="text/html", headers=headers)


def _metadata(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the token of the header as calls of gRPC carry the token. Raises TOKEN_INVALID.

    Browsers send the token as a password.
    """
    value = headers.get("Authorization", "")
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() == "basic":
        try:
            value = f"Bearer {base64.b64decode(encoded, validate=True).decode().partition(':')[2]}"
        except (binascii.Error, UnicodeDecodeError):
            raise Reason.TOKEN_INVALID.error() from None
    return {HEADER: value} if value else {}


@functools.cache
def _page() -> tuple[str, str]:
    """Return the page, and the policy that permits only the page's script and style."""
    page = resources.files(__package__).joinpath("page.html").read_text()
    hashes = {
        kind: f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for kind, text in _INLINE.findall(page)
    }
    allowed = f"script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'"
    return page, f"{_POLICY}; {allowed}"
