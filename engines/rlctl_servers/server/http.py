"""Calls to one engine server, with time limits and typed errors."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime.http_client import Broken, Client, NotConnected, Origin, Response
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN

CONNECT_S = 5.0

AGAIN = "Send the request again."
"""Next step after the connection of a forwarded request broke."""

_JSON = ("Content-Type", "application/json")
_PLAIN = ("Accept-Encoding", "identity")
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
        self._clients: dict[asyncio.AbstractEventLoop, Client] = {}
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
        reuse: bool = False,
    ) -> Answer:
        """POST a body, or GET without a body, unless ``method`` is set. A redirect is a refusal.

        ``reuse``: use a kept connection, as every GET does. Otherwise the call has a connection of its own: the server
        may close a kept one meanwhile, and the outcome of the call would be unknown.

        Raises UNREACHABLE (REJECTED: nothing was sent), LINK_LOST (UNKNOWN: the connection broke), TimeoutError.
        """
        method = method or ("GET" if body is None else "POST")
        headers, once = self._headers(key or self._keys[admin]), method != "GET" and not reuse
        try:
            async with asyncio.timeout(max(timeout_s, 0.001)):
                with closing(await self._send(method, path, headers, _written(body), once=once)) as response:
                    return await _answer(response)
        except Broken as error:
            raise self.broken(error) from error

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """POST a body and yield the events of the answer. Closing the generator ends the connection and the request.

        Raises as :meth:`call`, without a time limit. Raises ENGINE_FAILED for an answer without events, with the status
        in the metadata, and ANSWER_INVALID (UNKNOWN) for an invalid event.
        """
        headers = self._headers(self._keys[False])
        try:
            with closing(await self._send("POST", path, headers, _written(body))) as response:
                if response.status != 200:
                    answer = await _answer(response)
                    raise Reason.ENGINE_FAILED.error(answer.message, metadata={"status": str(answer.status)})
                lines, piece = _Lines(), b"\n"
                while piece:
                    piece = await response.read()
                    for line in lines.after(piece or b"\n"):
                        if not line.startswith(_DATA):
                            continue
                        data = line[len(_DATA) :].strip()
                        if data == _DONE:
                            return
                        yield self._event(data)
                    if lines.rest_bytes > _LINE_BYTES:
                        raise self._odd(f"an event of more than {_LINE_BYTES} bytes")
        except Broken as error:
            raise self.broken(error) from error
        raise Reason.LINK_LOST.error(
            f"{self.product} ended its answer before the request had ended", outcome=OUTCOME_UNKNOWN
        )

    async def forward(self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes) -> Response:
        """Pass a request on, and return the answer once it has begun. Closing the answer ends the request.

        Raises as :meth:`call`, without a time limit. Reading the answer raises :class:`Broken`; see :meth:`broken`.
        """
        headers = [*headers, _PLAIN]
        if key := self._keys[False]:
            headers.append(_bearer(key))
        try:
            return await self._send(method, target, headers, body)
        except Broken as error:
            raise self.broken(error, AGAIN) from error

    async def _send(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes, *, once: bool = False
    ) -> Response:
        """Send a request and return its answer once it has begun. Raises UNREACHABLE, and Broken."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # uvicorn closes a connection silently after some failures, perhaps during a later request.
            self._clients[loop] = Client(connect_s=CONNECT_S, keep_s=_KEEPALIVE_S, keeps_failures=False)
        try:
            return await self._clients[loop].request(
                self._origin, method, self._prefix + target, headers, body, once=once
            )
        except NotConnected as error:
            raise Reason.UNREACHABLE.error(f"{self.product} at {self.url} cannot be reached: {error}") from error

    def broken(self, error: Broken, next_step: str = "") -> RlctlError:
        """Return the error of a request after its connection broke off."""
        return Reason.LINK_LOST.error(
            f"the connection to {self.product} at {self.url} broke: {error}",
            next_step=next_step,
            outcome=OUTCOME_UNKNOWN,
        )

    async def close(self) -> None:
        """Close the connections of all loops. A stuck loop closes its connections later."""
        current_loop = asyncio.get_running_loop()
        for loop, client in self._clients.items():
            if loop is current_loop:
                client.close()
            elif loop.is_running():
                loop.call_soon_threadsafe(client.close)
        self._clients.clear()

    @staticmethod
    def _headers(key: str) -> list[tuple[str, str]]:
        return [_JSON, _PLAIN, _bearer(key)] if key else [_JSON, _PLAIN]

    def _event(self, data: bytes) -> dict[str, Any]:
        event = _parse(data)
        if not isinstance(event, dict):
            raise self._odd(repr(event)[:_SHOWN])
        return event

    def _odd(self, what: str) -> RlctlError:
        return Reason.ANSWER_INVALID.error(f"{self.product} sent {what} for an event", outcome=OUTCOME_UNKNOWN)


class _Lines:
    """The lines of an answer that comes in pieces.

    Attributes:
        rest_bytes: size of the line that has begun.
    """

    def __init__(self) -> None:
        self.rest_bytes = 0
        self._rest: list[bytes] = []

    def after(self, piece: bytes) -> list[bytes]:
        """Return the lines that end in a piece."""
        self._rest.append(piece)
        if b"\n" not in piece:
            self.rest_bytes += len(piece)
            return []
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest, self.rest_bytes = [rest], len(rest)
        return lines


def _origin(url: str, socket: str) -> tuple[Origin, str]:
    """Return the server of a URL, and the prefix of all paths."""
    parts = urlsplit(url)
    secure, host = parts.scheme == "https", parts.hostname or ""
    tls, name = (ssl.create_default_context(), host) if secure else (None, None)
    authority = parts.netloc.rpartition("@")[2]
    return Origin(authority, host, parts.port or (443 if secure else 80), tls, name, socket), parts.path.rstrip("/")


def _bearer(key: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {key}"


def _written(body: dict[str, Any] | None) -> bytes:
    return b"" if body is None else orjson.dumps(body)


async def _answer(response: Response) -> Answer:
    """Return the answer. A redirect is a refusal: its destination has not received the request."""
    if 300 <= response.status < 400:
        location = next((value for name, value in response.headers if name.lower() == "location"), "")
        return Answer(response.status, f"HTTP {response.status}: it leads to {location}")
    return Answer(response.status, _parse(await response.read_all()))


def _parse(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except ValueError:
        return data.decode(errors="replace")
