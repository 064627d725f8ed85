"""HTTP/1.1 client for engine servers and data ports. It keeps connections.

A request goes out and an answer comes in as sent: without redirects, cookies and decompression. aiohttp's client takes
twice the processor time of aiohttp's server for a request (docs/benchmarks/lessons.md, data_port).
"""

from __future__ import annotations

import asyncio
import re
import select
import ssl
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, cast
from urllib.parse import quote

from rlctl.runtime.http_answers import Parser
from rlctl.runtime.keepalive import keep_alive

FLOW_BYTES = 64 << 10
"""Unread bytes of an answer beyond which no more are received."""

_PIECE = 64 << 10
"""Bytes of a body that are written at once. The rest of a large body waits until the connection has room."""

_FIRST_FAILURE = 400

_TARGET = re.compile(r"[!-~]+")
_PRINTABLE = "".join(map(chr, range(ord("!"), ord("~") + 1)))
_BODILESS = ("GET", "HEAD")


class NotConnected(Exception):
    """No connection was made, so nothing was sent. The cause is an ssl.SSLError, another OSError, or a timeout."""


class Broken(Exception):
    """The connection ended before the answer, or the answer is not HTTP."""


class Origin(NamedTuple):
    """A server.

    Attributes:
        authority: value of the header Host.
        tls, server_name: context and name for TLS; None for plain text.
        socket: path of a Unix socket, in place of host and port.
    """

    authority: str
    host: str
    port: int
    tls: ssl.SSLContext | None = None
    server_name: str | None = None
    socket: str = ""


class Client:
    """Connections to servers, on one event loop."""

    def __init__(self, *, connect_s: float, keep_s: float, keeps_failures: bool = True) -> None:
        """``connect_s``: longest time to connect. ``keep_s``: longest idle time of a connection; less than that of the
        servers. ``keeps_failures``: a connection is also kept after an answer about a failure (4xx, 5xx).
        """
        self.keeps_failures = keeps_failures
        self._connect_s = connect_s
        self._keep_s = keep_s
        self._loop = asyncio.get_running_loop()
        self._open: set[_Connection] = set()
        self._idle: dict[Origin, deque[_Connection]] = {}
        """In the order in which they became idle."""
        self._sweeping: asyncio.TimerHandle | None = None

    async def request(
        self,
        origin: Origin,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        *,
        once: bool = False,
    ) -> Response:
        """Send a request without a retry, and return its answer, when the head has come. The caller closes the answer.

        ``headers``: without Host and Content-Length; ``once``: over a connection for this request only. Raises
        NotConnected, Broken; ValueError for a header with a line break or NUL.
        """
        head = _head(origin, method, target, headers, len(body))
        connection = (None if once else self._kept(origin)) or await self._connected(origin)
        connection.is_kept = not once
        return await connection.exchange(method, head, body)

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            connection.drop()

    def _kept(self, origin: Origin) -> _Connection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if self._loop.time() - connection.idle_since < self._keep_s and connection.is_quiet:
                return connection
            connection.abort()
        return None

    async def _connected(self, origin: Origin) -> _Connection:
        def make() -> _Connection:
            return _Connection(self, origin)

        try:
            async with asyncio.timeout(self._connect_s):
                if origin.socket:
                    _, connection = await self._loop.create_unix_connection(make, origin.socket)
                else:
                    _, connection = await self._loop.create_connection(
                        make, origin.host, origin.port, ssl=origin.tls, server_hostname=origin.server_name
                    )
        except TimeoutError as error:
            raise NotConnected(str(error) or f"no connection within {self._connect_s:g} s") from error
        except (OSError, UnicodeError) as error:  # also SSLError; a host name that IDNA refuses
            raise NotConnected(str(error) or type(error).__name__) from error
        if not connection.is_open:
            raise NotConnected("the server closed the connection")
        return connection

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def closed(self, connection: _Connection) -> None:
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:
            idle.remove(connection)

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for a further request."""
        connection.idle_since = self._loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(self._keep_s, self._sweep)

    def _sweep(self) -> None:
        """Close the connections that have been idle too long."""
        before = self._loop.time() - self._keep_s
        for origin, idle in list(self._idle.items()):
            while idle and idle[0].idle_since <= before:
                idle.popleft().abort()
            if not idle:
                del self._idle[origin]
        self._sweeping = self._loop.call_later(self._keep_s, self._sweep) if self._idle else None


class _Connection(asyncio.Protocol):
    """A connection, with one request at a time.

    Attributes:
        idle_since: end of the last answer, on the loop's clock.
        is_kept: the connection is kept after the answer.
    """

    def __init__(self, client: Client, origin: Origin) -> None:
        self.origin = origin
        self.idle_since = 0.0
        self.is_kept = True
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._unsent: bytes | memoryview = b""
        self._is_full = False
        self._poll = select.poll()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_quiet(self) -> bool:
        """Return whether the connection is open and nothing has come, neither data nor its end.

        The loop may not have read yet what the server has sent.
        """
        return self.is_open and not self._poll.poll(0)

    async def exchange(self, method: str, head: bytes, body: bytes) -> Response:
        """Send a request and wait for the head of its answer. Raises Broken."""
        assert self._transport is not None
        response = self._response = Response(self, method)
        if len(body) < _PIECE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._unsent = memoryview(body)
            self._send_more()
        try:
            await response.begun()
        except BaseException:
            response.close()
            raise
        return response

    def _send_more(self) -> None:
        while self._unsent and not self._is_full and self._transport is not None and self.is_open:
            piece, rest = self._unsent[:_PIECE], self._unsent[_PIECE:]
            self._unsent = rest or b""  # an empty view would keep the body
            self._transport.write(piece)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._send_more()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        keep_alive(connection)  # the next piece of an answer has no time limit
        self._poll.register(connection.fileno(), select.POLLIN)
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self.abort()  # no answer is due
        else:
            self._response.feed(data)

    def eof_received(self) -> None:
        """Close the connection, without waiting for a server that reads the request no more."""
        if self._transport is not None and (self._unsent or self._transport.get_write_buffer_size()):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._client.closed(self)
        cause = (str(exc) or type(exc).__name__) if exc else "the server closed the connection"
        self._lose(Broken(cause), is_end=exc is None)

    def _lose(self, failure: Broken, *, is_end: bool) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.lost(failure, is_end=is_end)

    def read(self, *, more: bool) -> None:
        """Receive data again, or no more."""
        if self._transport is not None and not self._transport.is_closing():
            (self._transport.resume_reading if more else self._transport.pause_reading)()

    def release(self, *, keeps: bool) -> None:
        """End the request. Without ``keeps``, the connection is closed."""
        self._response = None
        # A server may answer before it has read the body.
        is_sent = self._transport is not None and not self._unsent and not self._transport.get_write_buffer_size()
        if keeps and self.is_kept and is_sent and self.is_open:
            self._client.keep(self)
        else:
            self.abort()

    def keeps(self, status: int) -> bool:
        """Return whether a connection may be kept after an answer with this status."""
        return self._client.keeps_failures or status < _FIRST_FAILURE

    def abort(self) -> None:
        """Close the connection. Its request is no longer of interest."""
        self._response = None
        self.drop()

    def drop(self) -> None:
        """Close the connection. Its answer is broken."""
        self._lose(Broken("the client was closed"), is_end=False)
        self._unsent = b""
        if self._transport is not None:
            self._transport.abort()


class Response:
    """The answer to one request. Closing it before its end ends the request."""

    def __init__(self, connection: _Connection, method: str) -> None:
        self._connection: _Connection | None = connection
        self._parser = Parser(method)
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Broken | None = None

    @property
    def status(self) -> int:
        return self._parser.status

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Return the end-to-end headers, without Content-Length."""
        return self._parser.headers

    @property
    def length(self) -> str:
        """Return the header Content-Length, or ""."""
        return self._parser.length

    @property
    def content_type(self) -> str:
        """Return the content type without parameters, in lower case."""
        return self._parser.content_type

    @property
    def has_length(self) -> bool:
        """Return whether the server has declared the length of the body, or there is no body."""
        return self._parser.has_length

    async def begun(self) -> None:
        """Wait for the head. Raises Broken."""
        while not self.status:
            await self._news()

    async def read(self) -> bytes:
        """Return the next piece of the body; b"" at its end. Raises Broken."""
        while not self._pieces:
            if self._parser.ended:
                return b""
            await self._news()
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces, self._size = [], 0
        if self._is_paused and self._connection is not None:
            self._is_paused = False
            self._connection.read(more=True)
        return piece

    async def read_all(self) -> bytes:
        """Return the rest of the body. Raises Broken."""
        whole = await self.read()
        if self._parser.ended and not self._pieces:
            return whole
        pieces = [whole]
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """End the request, unless the answer has ended."""
        self._parser.drop()
        self._release(keeps=False)

    def feed(self, data: bytes) -> None:
        """Take data of the connection."""
        try:
            pieces = self._parser.feed(data)
        except ValueError as error:
            self._release(keeps=False)
            self.lost(Broken(f"the answer is not HTTP: {error}"), is_end=False)
            return
        self._pieces += pieces
        self._size += sum(map(len, pieces))
        if self._parser.ended and self._connection is not None:
            self._release(keeps=self._parser.keeps and self._connection.keeps(self._parser.status))
        elif self._size > FLOW_BYTES and not self._is_paused and self._connection is not None:
            self._is_paused = True
            self._connection.read(more=False)
        self._wake()

    def lost(self, failure: Broken, *, is_end: bool) -> None:
        """Record the end of the connection. ``is_end``: the server has ended it in order."""
        self._connection = None
        if is_end and self._parser.is_until_close:
            self._parser.ended = True
        else:
            self._failure = failure
        self._wake()

    def _release(self, *, keeps: bool) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._is_paused:
                connection.read(more=True)
            connection.release(keeps=keeps)

    async def _news(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _head(origin: Origin, method: str, target: str, headers: Sequence[tuple[str, str]], length: int) -> bytes:
    if not _TARGET.fullmatch(target):
        target = quote(target, safe=_PRINTABLE, errors="surrogateescape")
    lines = [f"{method} {target} HTTP/1.1", f"Host: {origin.authority}"]
    if length or method not in _BODILESS:
        lines.append(f"Content-Length: {length}")
    lines += [f"{name}: {value}" for name, value in headers]
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1 or "\0" in head:
        raise ValueError("a header contains a line break or NUL")
    return (head + "\r\n\r\n").encode(errors="surrogateescape")
