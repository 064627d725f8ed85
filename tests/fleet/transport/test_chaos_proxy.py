"""The chaos proxy does what its name of each fault says, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from rlctl.testing.chaos_proxy import ChaosProxy


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1024):
            writer.write(data)
            await writer.drain()
        writer.write(b"<end>")
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[ChaosProxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with ChaosProxy(f"{host}:{port}") as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        yield proxy, reader, writer
        writer.close()
    server.close()
    await server.wait_closed()


async def said(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    writer.write(data)
    return await reader.readexactly(len(data))


async def test_bytes_and_the_end_of_a_side_go_through() -> None:
    async with proxied() as (proxy, reader, writer):
        data = bytes(range(256)) * 4096
        assert await said(reader, writer, data) == data
        writer.write_eof()
        assert await reader.read() == b"<end>"
        assert proxy.connections == 1


async def test_latency_delays_each_direction_and_keeps_the_order() -> None:
    async with proxied() as (proxy, reader, writer):
        proxy.latency_s = 0.1
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert await said(reader, writer, b"a") == b"a"
        assert loop.time() - started >= 0.2
        writer.write(b"1")
        await writer.drain()
        proxy.latency_s = 0.0
        writer.write(b"2")
        assert await reader.readexactly(2) == b"12"


async def test_a_blackhole_holds_everything_back_until_it_is_lifted() -> None:
    async with proxied() as (proxy, reader, writer):
        assert await said(reader, writer, b"a") == b"a"
        proxy.blackhole = True
        assert proxy.blackhole
        writer.write(b"b")
        new = await asyncio.open_connection(*proxy.address.split(":"))
        new[1].write(b"c")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asyncio.wait(
                    {asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(new[0].read(1))},
                    return_when=asyncio.FIRST_COMPLETED,
                )
    # Stopped in a blackhole: nothing hangs.


async def test_what_was_sent_into_a_blackhole_arrives_afterwards() -> None:
    async with proxied() as (proxy, reader, writer):
        proxy.blackhole = True
        writer.write(b"b")
        await writer.drain()
        proxy.blackhole = False
        assert await reader.readexactly(1) == b"b"


async def test_a_reset_breaks_what_stands_and_lets_new_connections_through() -> None:
    async with proxied() as (proxy, reader, writer):
        assert await said(reader, writer, b"a") == b"a"
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        again = await asyncio.open_connection(*proxy.address.split(":"))
        assert await said(*again, b"b") == b"b"
        again[1].close()


async def test_a_target_that_is_not_there_closes_the_connection() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with ChaosProxy(f"127.0.0.1:{port}") as proxy:
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
