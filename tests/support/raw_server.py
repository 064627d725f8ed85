"""A server of single bytes, for what no HTTP server sends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from rlctl_servers.server.http import Http

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[tuple[Http, list[bytes]]]:
    """Yield calls to a server, and the heads of its requests. ``serve`` gets the connection's number."""
    heads: list[bytes] = []
    tasks: set[asyncio.Task[None]] = set()
    numbers = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal numbers
        numbers += 1
        number, task = numbers, asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                await serve(reader, writer, number)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    http = Http("vLLM", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v", api_key="k")
    try:
        yield http, heads
    finally:
        await http.close()
        server.close()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)  # each ends with its connection
