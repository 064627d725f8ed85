"""Answers at a data port: of an engine in pieces, and of a server whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from rlctl.engine import HttpExchange, HttpHead
from rlctl.runtime.http_client import Response


class Pieces(HttpExchange):
    """An engine's answer, piece by piece."""

    def __init__(self, content_type: str, pieces: AsyncGenerator[bytes, None]) -> None:
        self._content_type = content_type
        self._pieces = pieces

    async def begin(self) -> HttpHead:
        return HttpHead(200, [("Content-Type", self._content_type)])

    async def read(self) -> bytes:
        return await anext(self._pieces, b"")

    def close(self) -> None:
        """Leave the pieces to the collector."""


async def once(piece: bytes) -> AsyncGenerator[bytes, None]:
    yield piece


def answered(body: bytes, content_type: str) -> Response:
    """Return a server's answer, as if it had come over a connection."""
    connection: Any = None
    response = Response(connection, "POST")
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    response.feed(head.encode() + body)
    return response
