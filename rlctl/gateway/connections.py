"""Callers that hold a connection and neither ask nor listen are cut off.

aiohttp bounds neither how long the head of a request may take nor how long a caller may take nothing of an answer. So
each of its connections is looked after by a :class:`Guard` that stands between it and the transport.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import cast

from aiohttp import web

HEAD_S = 30.0
"""Longest from a connection's beginning, or from the first byte after a request, to the end of a request's head."""

WRITE_S = 60.0
"""A caller that takes nothing of an answer for so long is gone."""

IDLE_S = 3600.0
"""A connection without a request is kept for so long: trainers come again after a step."""


class Site(web.BaseSite):
    """A listener whose connections are guarded."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, *, share_port: bool = False) -> None:
        """``share_port``: other processes listen there too (SO_REUSEPORT)."""
        super().__init__(runner)
        self._host = host
        self._port = port
        self._share_port = share_port

    @property
    def name(self) -> str:
        """Where it was told to listen."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await super().start()
        make = self._runner.server
        assert make is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Guard(make()), self._host, self._port, reuse_port=self._share_port or None, backlog=128
        )


class Guard(asyncio.Protocol):
    """One connection of aiohttp's."""

    def __init__(self, inner: asyncio.Protocol) -> None:
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._requests = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """While one whose head is here is answered."""
        self._requests += 1
        self._in_time("head")
        try:
            yield
        finally:
            self._requests -= 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Await a head."""
        self._transport = cast(asyncio.Transport, transport)
        self._await_head()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Await the end of a head, unless the data are a request's that has begun."""
        if not self._requests and "head" not in self._timers:
            self._await_head()
        self._inner.data_received(data)

    def _await_head(self) -> None:
        self._timers["head"] = self._loop.call_later(HEAD_S, self._late)

    def _late(self) -> None:
        assert self._transport is not None
        if "write" in self._timers:
            self._await_head()  # the answer before it has not got through yet
        else:
            self._transport.close()

    def _in_time(self, what: str) -> None:
        if what in self._timers:
            self._timers.pop(what).cancel()

    def pause_writing(self) -> None:
        """The caller takes less than it is told."""
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
        """It has taken what waited."""
        self._in_time("write")
        self._inner.resume_writing()

    def eof_received(self) -> bool | None:
        """It sends nothing more."""
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there."""
        for what in ("head", "write"):
            self._in_time(what)
        self._inner.connection_lost(exc)


def answering(request: web.Request) -> contextlib.AbstractContextManager[None]:
    """While a request is answered its connection may be silent."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol.request() if isinstance(protocol, Guard) else contextlib.nullcontext()
