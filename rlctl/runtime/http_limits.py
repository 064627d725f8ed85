"""Time limits for the callers of an HTTP server: idle and slow connections are closed.

aiohttp bounds neither the time of an arriving request nor the time of a caller that reads nothing of an answer.
Therefore a :class:`Guard` stands between each of aiohttp's connections and the transport. Bodies are read by
:mod:`rlctl.runtime.http_bodies`. Used by the gateway and the sidecar for vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

from aiohttp import web

from rlctl.contract.os_errors import unbound

HEAD_S = 30.0
"""Longest time to the end of a request's head, from the connection's start or from the first byte after a request."""

WRITE_S = 60.0
"""Longest time in which a caller may read nothing of an answer."""

IDLE_S = 3600.0
"""Longest idle time of a connection: trainers return after a step."""

_LENGTH = re.compile(rb"(?im)^content-length:[ \t]*(\d{1,18})")
_CHUNKED = re.compile(rb"(?im)^transfer-encoding:.*chunked")
_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")


BACKLOG = 4096
"""Connections that may wait for acceptance: a trainer sends its batch at once."""


_Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Site(web.BaseSite):
    """A listener with guarded connections."""

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        *,
        share_port: bool = False,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """``share_port``: other processes listen there too (SO_REUSEPORT). The application needs :func:`answering`."""
        super().__init__(runner, backlog=BACKLOG, ssl_context=ssl_context)
        self._host = host
        self._port = port
        self._share_port = share_port

    @property
    def name(self) -> str:
        """Return the URL of the configured address."""
        return f"{'https' if self._ssl_context else 'http'}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises FIELD_INVALID if the address cannot be bound."""
        await super().start()
        make = self._runner.server
        assert make is not None
        make.request_handler = _refusing_expectations(make.request_handler)
        loop, shared = asyncio.get_running_loop(), self._share_port or None
        try:
            self._server = await loop.create_server(
                lambda: Guard(make()),
                self._host,
                self._port,
                ssl=self._ssl_context,
                ssl_handshake_timeout=HEAD_S if self._ssl_context else None,
                reuse_port=shared,
                backlog=self._backlog,
            )
        except OSError as error:
            host = f"[{self._host}]" if ":" in self._host else self._host
            raise unbound(f"{host}:{self._port}", error) from None


def _refusing_expectations(handle: _Handle) -> _Handle:
    """Refuse a header ``Expect`` that is not ASCII. aiohttp puts the value into its answer, and fails to encode it."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect", "").isascii():
            return await handle(request)
        return web.Response(status=417, text="Unknown Expect")

    return answer


class Guard(asyncio.Protocol):
    """Guard of a connection of aiohttp."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._heads = _Heads()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._answering = 0  # number of requests
        self._turns = 0  # number of starts and ends of answers
        self._seen = 0  # value of _turns at the last wait for a head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._await_head()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Start the time limit of a head that has begun, anywhere in the data."""
        if self._heads.feed(data):
            self._in_time("head")
        if self._heads.begun and "head" not in self._timers:
            self._await_head()
        self._inner.data_received(data)

    @contextlib.contextmanager
    def answer(self) -> Iterator[None]:
        """Let the connection be silent while a request is answered."""
        self._answering += 1
        self._turns += 1
        try:
            yield
        finally:
            self._answering -= 1
            self._turns += 1

    def _await_head(self) -> None:
        self._seen = self._turns
        self._timers["head"] = self._loop.call_later(HEAD_S, self._late)

    def _late(self) -> None:
        assert self._transport is not None
        if self._answering or self._turns != self._seen or "write" in self._timers:
            self._await_head()  # an earlier request is being answered, or was answered just now
        else:
            self._transport.close()

    def _in_time(self, what: str) -> None:
        if what in self._timers:
            self._timers.pop(what).cancel()

    def pause_writing(self) -> None:
        self._await_reading()
        self._inner.pause_writing()

    def _await_reading(self) -> None:
        assert self._transport is not None
        waiting = self._transport.get_write_buffer_size()
        self._timers["write"] = self._loop.call_later(WRITE_S, self._unread, waiting)

    def _unread(self, before: int) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() < before:
            self._await_reading()
        else:
            self._transport.abort()

    def resume_writing(self) -> None:
        self._in_time("write")
        self._inner.resume_writing()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        for what in ("head", "write"):
            self._in_time(what)
        self._inner.connection_lost(exc)


class _Heads:
    """Finds the heads of requests in a connection's data, with the needed minimum of HTTP/1.1.

    aiohttp's parser does not tell whether a head is incomplete. Where the two disagree the request is malformed, and
    aiohttp ends the connection.
    """

    def __init__(self) -> None:
        self._within = "head"  # or "chunk", the line with a chunk's size, or "trailer", a line after the last chunk
        self._part = b""  # incomplete data of that part
        self._skip = 0  # bytes of a body before the next part

    @property
    def begun(self) -> bool:
        """Return True if a head has begun and not ended."""
        return self._within == "head" and bool(self._part.strip())

    def feed(self, data: bytes) -> bool:
        """Return True if a head has ended in these data."""
        ended, at, data = False, 0, self._part + data
        self._part = b""
        while at < len(data):
            skipped = min(self._skip, len(data) - at)
            self._skip -= skipped
            at += skipped
            mark = b"\r\n\r\n" if self._within == "head" else b"\r\n"
            end = data.find(mark, at)
            if self._skip or end < 0:
                self._part = data[at:]
                break
            part, at = data[at:end], end + len(mark)
            if self._within == "head":
                ended = ended or bool(part.strip())
                self._after_head(part)
            else:
                self._after_line(part)
        return ended

    def _after_head(self, head: bytes) -> None:
        length = _LENGTH.search(head)
        if _CHUNKED.search(head):
            self._within = "chunk"
        elif length:
            self._skip = int(length[1])

    def _after_line(self, line: bytes) -> None:
        size = _SIZE.match(line) if self._within == "chunk" else None
        if size and (more := int(size[0], 16)):
            self._skip = more + len(b"\r\n")
        elif size:
            self._within = "trailer"
        elif not line or self._within == "chunk":  # the trailers have ended, or the data are not HTTP
            self._within = "head"


@web.middleware
async def answering(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Tell a connection's guard of its requests. The outermost middleware of an application."""
    guard = request.transport.get_protocol() if request.transport is not None else None
    if not isinstance(guard, Guard):
        return await handler(request)
    with guard.answer():
        return await handler(request)
