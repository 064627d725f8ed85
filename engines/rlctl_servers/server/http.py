"""Calls to one engine server, with time limits and typed errors."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from aiohttp.http_exceptions import LineTooLong

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.http_client import Broken, Client, NotConnected, Origin, Response
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN

CONNECT_S = 5.0
_JSON = {"Content-Type": "application/json"}
_DATA = b"data:"
_DONE = b"[DONE]"
_LINE_BYTES = 1 << 26
_SHOWN = 200
_KEEPALIVE_S = 2.0
"""Less than the servers' own 5 s: a call must not use a connection that is just being closed."""


@dataclass(frozen=True)
class Answer:
    """The answer of a server.

    Attributes:
        status: HTTP status.
        body: JSON document, or text.
    """

    status: int
    body: Any

    @property
    def ok(self) -> bool:
        return self.status == 200 and not (isinstance(self.body, dict) and self.body.get("success") is False)

    @property
    def message(self) -> str:
        body = self.body
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            body = body["error"]
        if isinstance(body, dict):
            body = body.get("message") or body.get("error_message") or body.get("error") or body
        return str(body).strip() or f"HTTP {self.status}"


class Http:
    """The server's HTTP interface, usable from several event loops.

    Attributes:
        product: name for messages, such as "SGLang".
        url: address of the server.
    """

    def __init__(self, product: str, url: str, api_key: str = "", admin_key: str = "", *, socket: str = "") -> None:
        """``socket``: path of the server's Unix socket; the address is then only for messages."""
        self.product = product
        self.url = url
        self._socket = socket
        self._keys = {False: api_key, True: admin_key}
        self._sessions: dict[tuple[asyncio.AbstractEventLoop, bool], aiohttp.ClientSession] = {}
        self._flows: dict[asyncio.AbstractEventLoop, Client] = {}
        self._origin, self._prefix = _origin(url, socket)

    async def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float,
        admin: bool = True,
        key: str = "",
        method: str = "",
    ) -> Answer:
        """POST a body, or GET without a body, unless ``method`` is set.

        Raises UNREACHABLE (REJECTED: nothing was sent), LINK_LOST (UNKNOWN: the connection broke), TimeoutError.
        """
        method = method or ("GET" if body is None else "POST")
        limit = aiohttp.ClientTimeout(total=max(timeout_s, 0.001), connect=CONNECT_S)
        headers = self._headers(admin=admin, key=key)
        try:
            reads = method == "GET"
            async with self._session(once=not reads).request(
                method, self.url + path, data=_written(body), headers=headers, timeout=limit, allow_redirects=reads
            ) as response:
                return await _answer(response)
        except aiohttp.ClientError as error:
            raise self._broken(error) from error

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """POST a body and yield the events of the answer. Closing the generator ends the connection and the request.

        Raises as :meth:`call`, without a time limit. Raises ENGINE_FAILED for an answer without events, with the status
        in the metadata, and ANSWER_INVALID (UNKNOWN) for an invalid event.
        """
        try:
            async with await self._posted(path, _written(body)) as response:
                if response.status != 200:
                    answer = await _answer(response)
                    raise Reason.ENGINE_FAILED.error(answer.message, metadata={"status": str(answer.status)})
                async for line in response.content:
                    if not line.startswith(_DATA):
                        continue
                    data = line[len(_DATA) :].strip()
                    if data == _DONE:
                        return
                    yield self._event(data)
        except LineTooLong as error:
            raise self._odd(f"an event of more than {_LINE_BYTES} bytes") from error
        except aiohttp.ClientError as error:
            raise self._broken(error) from error
        raise Reason.LINK_LOST.error(
            f"{self.product} ended its answer before the request had ended", outcome=OUTCOME_UNKNOWN
        )

    async def forward(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> Response:
        """Pass a request on, and return the answer once it has begun. Closing the answer ends the request.

        Raises as :meth:`call`, without a time limit. Reading the answer raises :class:`Broken`; see :meth:`broken`.
        """
        headers = [*headers, ("Accept-Encoding", "identity")]
        if key := self._keys[False]:
            headers.append(("Authorization", f"Bearer {key}"))
        loop = asyncio.get_running_loop()
        if loop not in self._flows:
            # uvicorn closes a connection silently after some failures, perhaps during a later request.
            self._flows[loop] = Client(connect_s=CONNECT_S, keep_s=_KEEPALIVE_S, keeps_failures=False)
        try:
            return await self._flows[loop].request(self._origin, method, self._prefix + target, headers, body)
        except NotConnected as error:
            raise self._unreached(error) from error
        except Broken as error:
            raise self.broken(error) from error

    def broken(self, error: Exception) -> RlctlError:
        """Return the error of a forwarded request after its answer broke off."""
        return self._lost(error, next_step="Send the request again.")

    async def _posted(self, path: str, data: bytes | None) -> aiohttp.ClientResponse:
        """POST a body and return the beginning of the answer. A body that could not be written is written again.

        Under load the server may have closed the kept connection before this process notices.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        options: dict[str, Any] = {"headers": self._headers(admin=False), "timeout": limit, "allow_redirects": False}
        try:
            return await self._session().post(self.url + path, data=data, **options)
        except aiohttp.ClientOSError as error:
            if isinstance(error, aiohttp.ClientConnectorError) or error.errno != errno.EPIPE:
                raise
            await asyncio.sleep(0)  # the loop sees closed connections
            return await self._session().post(self.url + path, data=data, **options)

    async def close(self) -> None:
        """Close the connections of all loops, within CONNECT_S for all other loops together."""
        current_loop = asyncio.get_running_loop()
        closing: list[asyncio.Future[None]] = []
        for (loop, *_), session in self._sessions.items():
            if loop is current_loop:
                await session.close()
            elif loop.is_running():
                closing.append(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.close(), loop)))
        if closing:
            await asyncio.wait(closing, timeout=CONNECT_S)  # a stuck loop closes its connections later
        self._sessions.clear()
        for loop, client in self._flows.items():
            if loop is current_loop:
                client.close()
            elif loop.is_running():
                loop.call_soon_threadsafe(client.close)
        self._flows.clear()

    def _session(self, *, once: bool = False) -> aiohttp.ClientSession:
        """Return a session. ``once``: a new connection for each call.

        uvicorn silently closes the connection of an answer about a failure. A later call on that connection would have
        an unknown outcome.
        """
        key = asyncio.get_running_loop(), once
        if key not in self._sessions:
            settings: dict[str, Any] = {"force_close": True} if once else {"keepalive_timeout": _KEEPALIVE_S}
            connector: aiohttp.BaseConnector
            if self._socket:
                connector = aiohttp.UnixConnector(self._socket, limit=0, **settings)
            else:
                connector = aiohttp.TCPConnector(limit=0, **settings)
            self._sessions[key] = aiohttp.ClientSession(connector=connector, read_bufsize=_LINE_BYTES)
        return self._sessions[key]

    def _headers(self, *, admin: bool, key: str = "") -> dict[str, str]:
        key = key or self._keys[admin]
        return {**_JSON, "Authorization": f"Bearer {key}"} if key else _JSON

    def _event(self, data: bytes) -> dict[str, Any]:
        event = _parse(data)
        if not isinstance(event, dict):
            raise self._odd(repr(event)[:_SHOWN])
        return event

    def _odd(self, what: str) -> RlctlError:
        return Reason.ANSWER_INVALID.error(f"{self.product} sent {what} for an event", outcome=OUTCOME_UNKNOWN)

    def _broken(self, error: aiohttp.ClientError) -> RlctlError:
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            return self._unreached(error)
        return self._lost(error)

    def _lost(self, error: Exception, next_step: str = "") -> RlctlError:
        return Reason.LINK_LOST.error(
            f"the connection to {self.product} at {self.url} broke: {str(error) or type(error).__name__}",
            next_step=next_step,
            outcome=OUTCOME_UNKNOWN,
        )

    def _unreached(self, error: Exception) -> RlctlError:
        return Reason.UNREACHABLE.error(f"{self.product} at {self.url} cannot be reached: {error}")


def _origin(url: str, socket: str) -> tuple[Origin, str]:
    """Return the server of a URL, and the prefix of all paths."""
    parts = urlsplit(url)
    secure, host = parts.scheme == "https", parts.hostname or ""
    tls, name = (ssl.create_default_context(), host) if secure else (None, None)
    authority = parts.netloc.rpartition("@")[2]
    return Origin(authority, host, parts.port or (443 if secure else 80), tls, name, socket), parts.path.rstrip("/")


def _written(body: dict[str, Any] | None) -> bytes | None:
    return None if body is None else orjson.dumps(body)


async def _answer(response: aiohttp.ClientResponse) -> Answer:
    """Return the answer. A redirect is a refusal: its destination has not received the request."""
    if 300 <= response.status < 400:
        return Answer(response.status, f"HTTP {response.status}: it leads to {response.headers.get('Location', '')}")
    return Answer(response.status, _parse(await response.read()))


def _parse(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        return data.decode(errors="replace")
