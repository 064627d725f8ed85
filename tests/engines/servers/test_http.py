"""Calls to a server that closes connections when it likes."""

from __future__ import annotations

import asyncio

from rlctl_servers.http import Http


async def test_a_call_after_one_that_failed_does_not_meet_its_connection() -> None:
    """As uvicorn does: it answers 500, as if the connection were to be used again, and closes it."""
    serving: list[asyncio.Task[None]] = []

    async def answer_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\nno")
        await reader.read(1)  # the next one is on its way when it closes
        writer.close()
        await writer.wait_closed()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.create_task(answer_and_close(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    http = Http("vLLM", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        for _ in range(2):
            answer = await http.call("/collective_rpc", {}, timeout_s=5.0)
            assert (answer.status, answer.body) == (500, "no")
    finally:
        await http.close()
        server.close()
        await asyncio.gather(*serving)
