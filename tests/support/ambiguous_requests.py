"""Requests with an ambiguous end: two servers may find it in different places (RFC 9112, 6.3 and 11.2)."""

from __future__ import annotations

import asyncio

_CHUNKED = b"Transfer-Encoding: chunked"
_CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"

AMBIGUOUS: dict[str, tuple[bytes, bytes]] = {
    "equal lengths": (b"Content-Length: 2\r\nContent-Length: 2", b"{}"),
    "unequal lengths": (b"Content-Length: 2\r\nContent-Length: 12", b"{}"),
    "list of lengths": (b"Content-Length: 2, 2", b"{}"),
    "length with a sign": (b"Content-Length: +2", b"{}"),
    "length, chunks": (b"Content-Length: 2\r\n" + _CHUNKED, _CHUNKS),
    "chunks, length": (_CHUNKED + b"\r\nContent-Length: 2", _CHUNKS),
    "length, identity": (b"Content-Length: 2\r\nTransfer-Encoding: identity", b"{}"),
    "chunks twice": (_CHUNKED + b"\r\n" + _CHUNKED, _CHUNKS),
    "list of chunks": (_CHUNKED + b", chunked", _CHUNKS),
    "chunks, identity": (_CHUNKED + b"\r\nTransfer-Encoding: identity", _CHUNKS),
    "identity, chunks": (b"Transfer-Encoding: identity\r\n" + _CHUNKED, _CHUNKS),
    "unknown coding": (b"Transfer-Encoding: xchunked", _CHUNKS),
    "space before the colon": (b"Content-Length: 2\r\nTransfer-Encoding : chunked", b"{}"),
    "folded line": (b"Content-Length: 2\r\nX-A: 1\r\n Transfer-Encoding: chunked", b"{}"),
    "length in the trailers": (_CHUNKED, b"2\r\n{}\r\n0\r\nContent-Length: 2\r\n\r\n"),
    "host twice": (b"Host: y\r\nContent-Length: 2", b"{}"),
}
"""Framing headers and body."""

_SECOND = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


async def answers(address: str, lines: bytes, body: bytes) -> list[int]:
    """Send a request to /generate and a second one behind it. Return the status of each answer before the server closes
    the connection.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n\r\n" + body + _SECOND)
        async with asyncio.timeout(10):
            received = await reader.read()
    finally:
        writer.close()
    return [int(each.split()[1]) for each in received.split(b"\r\n") if each.startswith(b"HTTP/1.")]
