"""Time limits for the callers of an HTTP server: idle and slow connections are closed.

aiohttp bounds neither the time of an arriving request nor the time of a caller that reads nothing of an answer.
Therefore a :class:`Guard` stands between each of aiohttp's connections and the transport. Bodies are read by
:mod:`rlctl.runtime.http_bodies`. Used by the gateway and the sidecar for vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web

from rlctl.contract.os_errors import unbound

HEAD_S = 30.0
"""Longest time to the end of a request's head: from the connection's start, or from the first data after an answer."""

WRITE_S = 60.0
"""Longest time in which a caller may read nothing of an answer."""

IDLE_S = 3600.0
"""Longest idle time of a connection: trainers return after a step."""

CUT_S = 0.25
"""``shutdown_timeout`` of a server with a drain of its own. aiohttp waits up to twice as long, and with 0 for ever."""

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
        """``share_port``: other processes listen there too (SO_REUSEPORT)."""
        super().__init__(runner, backlog=BACKLOG, ssl_context=ssl_context)
        self._host = host
        self._port = port
        self._share_port = share_port
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def name(self) -> str:
        """Return the URL of the configured address."""
        return f"{'https' if self._ssl_context else 'http'}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises FIELD_INVALID if the address cannot be bound."""
        await super().start()
        make = self._runner.server
        assert make is not None
        make.request_handler = self._counted(_guarded(make.request_handler))
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

    async def drain(self, within_s: float) -> None:
        """Wait until no handler runs and all answers are sent, at most ``within_s`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._idle.wait()

    def _counted(self, handle: _Handle) -> _Handle:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            self._running += 1
            self._idle.clear()
            try:
                response = await handle(request)
                with contextlib.suppress(ConnectionError):  # aiohttp would send it after this handler
                    await response.prepare(request)
                    await response.write_eof()
                return response
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()

        return answer


def _guarded(handle: _Handle) -> _Handle:
    """Tell a connection's guard of its requests, and refuse a header ``Expect`` that is not ASCII.

    aiohttp puts the value of ``Expect`` into its answer, and fails to encode it.
    """

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        guard = request.transport.get_protocol() if request.transport is not None else None
        if isinstance(guard, Guard):
            guard.begin()
        try:
            if request.headers.get("Expect", "").isascii():
                return await handle(request)
            return web.Response(status=417, text="Unknown Expect")
        finally:
            if isinstance(guard, Guard):
                request.content.on_eof(guard.end)

    return answer


class Guard(asyncio.Protocol):
    """Guard of a connection of aiohttp.

    aiohttp tells when a head has ended: a request begins. Data between two requests are the start of a head. Half a
    head that comes together with a whole request is not noticed. Without further data, that connection is idle.
    """

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._begun = 0  # requests whose handler or body has not ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._await_head()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Start the time limit of a head."""
        if not self._begun and "head" not in self._timers:
            self._await_head()
        self._inner.data_received(data)

    def begin(self) -> None:
        """Let the connection be silent: a request begins."""
        self._in_time("head")
        self._begun += 1

    def end(self) -> None:
        """A request has been answered, and its body is read."""
        self._begun -= 1

    def _await_head(self) -> None:
        self._timers["head"] = self._loop.call_later(HEAD_S, self._late)

    def _late(self) -> None:
        assert self._transport is not None
        if "write" in self._timers:
            self._await_head()  # the caller still reads the answer before
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
        if "head" in self._timers:  # the next request begins in a moment
            self._in_time("head")
            self._await_head()
        self._inner.resume_writing()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        for what in ("head", "write"):
            self._in_time(what)
        self._inner.connection_lost(exc)
