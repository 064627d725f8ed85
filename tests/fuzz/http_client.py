"""A client that sends bytes as they are, and reads one answer."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from tests.fuzz.http_requests import Request

MOST_KEPT = 64
"""Most idle connections of a client."""

MORE_S = 0.1
"""Wait for an answer to a request that may be incomplete."""

MOST_READ = 1 << 20
"""Most bytes that are read of an answer."""


@dataclass(frozen=True)
class Answer:
    """An answer. ``status`` 0: the server has closed the connection without a whole answer."""

    status: int
    body: bytes = b""


class Client:
    """Connections to one address."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def exchange(self, request: Request) -> Answer:
        """Send a request and read the answer."""
        reused = request.whole and bool(self._idle)
        reader, writer = self._idle.pop() if reused else await asyncio.open_connection(self._host, self._port)
        keep = False
        try:
            try:
                writer.write(request.data)
                answer, keep = await self._answer(request, reader, writer)
            except ConnectionError:
                answer = Answer(0)
            if reused and not answer.status:  # the server has closed the idle connection
                writer.close()
                reader, writer = await asyncio.open_connection(self._host, self._port)
                writer.write(request.data)
                answer, keep = await _read(reader, head=request.head)
            keep = keep and request.whole and len(self._idle) < MOST_KEPT
            if keep:
                self._idle.append((reader, writer))
            return answer
        finally:
            if not keep:
                writer.close()

    @staticmethod
    async def _answer(
        request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Answer, bool]:
        """Read the answer. A server that waits for more of a request gets the end of the stream."""
        reading = asyncio.ensure_future(_read(reader, head=request.head))
        try:
            if not request.whole:
                done, _ = await asyncio.wait({reading}, timeout=MORE_S)
                if not done:
                    writer.write_eof()
            return await reading
        finally:
            reading.cancel()

    async def alive(self) -> None:
        """Check that the server answers. Raises OSError."""
        data = b"GET /alive HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        self.close()
        answer = await self.exchange(Request(data, whole=True))
        if answer.status in (0, 500):
            raise OSError(f"{self._host}:{self._port} answers {answer}")

    def close(self) -> None:
        """Close the idle connections."""
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


async def _read(reader: asyncio.StreamReader, *, head: bool) -> tuple[Answer, bool]:
    """Return the answer, and True if the connection can be used again."""
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        return await _rest(reader, lines, head=head)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
        return Answer(0), False


async def _rest(reader: asyncio.StreamReader, lines: list[bytes], *, head: bool) -> tuple[Answer, bool]:
    if not lines[0].startswith(b"HTTP/1."):
        return Answer(0), False  # HTTP/0.9 has no head
    status = int(lines[0].split()[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
    keep = headers.get(b"connection", b"").lower() != b"close" and lines[0].startswith(b"HTTP/1.1")
    if head or status in (204, 304):
        return Answer(status), keep
    if b"content-length" in headers:
        return Answer(status, await reader.readexactly(int(headers[b"content-length"]))), keep
    body = b""
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        with contextlib.suppress(asyncio.IncompleteReadError):  # the server breaks off a stream whose request fails
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                body += (await reader.readexactly(size + 2))[:-2]
                if len(body) > MOST_READ:
                    return Answer(status, body), False
            await reader.readuntil(b"\r\n")
            return Answer(status, body), keep
        return Answer(status, body), False
    return Answer(status, await reader.read(MOST_READ)), False
