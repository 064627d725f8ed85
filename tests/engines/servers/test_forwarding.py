"""Requests that are forwarded to a server, over kept connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from pathlib import Path

import pytest
from raw_server import OK, serving
from rlctl_servers.server import http as http_
from rlctl_servers.server.http import Http
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime import http_client
from rlctl.runtime.http_client import Broken, Client, NotConnected, Origin


async def posted(http: Http, body: bytes = b"") -> bytes:
    response = await http.forward("POST", "/generate?a=%31", [("X-Mine", "m")], body)
    with contextlib.closing(response):
        return await response.read_all()


async def test_requests_go_out_as_they_are_over_one_connection() -> None:
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        connections.append(number)
        assert await reader.readexactly(4) == b"body"
        writer.write(OK)

    async with serving(serve) as (http, heads):
        for _ in range(3):
            assert await posted(http, b"body") == b"ok"
        assert connections == [1, 1, 1]
    lines = heads[0].decode().strip().split("\r\n")
    assert lines[0] == "POST /v/generate?a=%31 HTTP/1.1"
    assert {"Content-Length: 4", "X-Mine: m", "Accept-Encoding: identity", "Authorization: Bearer k"} < set(lines)


async def test_a_silent_connection_is_probed() -> None:
    """A network on the way, or a server's host, may forget the connection of a stream without a word."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(OK)

    async with serving(serve) as (http, _):
        assert await posted(http) == b"ok"
        [client] = http._clients.values()
        [connection] = client._open
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [10, 5, 3]


async def test_a_connection_that_the_server_closed_after_an_answer_gets_no_further_request() -> None:
    """uvicorn silently closes a connection after an answer with a failure."""
    connections: list[int] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        connections.append(number)
        writer.write(OK)
        await writer.drain()
        raise ConnectionError

    async with serving(serve) as (http, _):
        for _ in range(20):
            assert await posted(http) == b"ok"
    assert connections == list(range(1, 21))


async def test_a_request_that_the_server_may_have_begun_is_not_sent_again() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        if number == 1 and len(heads) == 2:
            raise ConnectionError
        writer.write(OK)

    async with serving(serve) as (http, heads):
        assert await posted(http) == b"ok"
        with pytest.raises(RlctlError) as lost:
            await posted(http)
        assert lost.value.reason is Reason.LINK_LOST
        assert len(heads) == 2
        assert await posted(http) == b"ok"


KEPT = [
    ("POST", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + OK, b"ok"),
    ("POST", b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b""),
    ("HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
    ("POST", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    (
        "POST",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n2;a=b\r\nok\r\n0\r\nX-T: 1\r\n\r\n",
        b"ok",
    ),
]


@pytest.mark.parametrize(("method", "answer", "body"), KEPT)
@pytest.mark.parametrize("apart", [False, True])
async def test_a_connection_is_used_again_after_a_whole_answer(
    method: str, answer: bytes, body: bytes, *, apart: bool
) -> None:
    connections: set[int] = set()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        connections.add(number)
        if apart and len(answer) < 100:
            for each in answer:
                writer.write(bytes([each]))
                await writer.drain()
                await asyncio.sleep(0)
        else:
            writer.write(answer)

    async with serving(serve) as (http, heads):
        for _ in range(3):
            with contextlib.closing(await http.forward(method, "/generate", [], b"")) as response:
                assert await response.read_all() == body
        assert (len(heads), connections) == (3, {1})


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
        OK + b"garbage",
    ],
)
async def test_a_connection_is_not_used_again_if_more_may_come_over_it(answer: bytes) -> None:
    connections: list[int] = []

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        connections.append(number)
        writer.write(answer)

    async with serving(serve) as (http, _):
        assert [await posted(http) for _ in range(3)] == [b"ok"] * 3
    assert connections == [1, 2, 3]


async def test_data_on_an_idle_connection_answer_no_later_request() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(OK)
        if number == 1:
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged")

    async with serving(serve) as (http, _):
        assert await posted(http) == b"ok"
        await asyncio.sleep(0.1)
        assert await posted(http) == b"ok"


async def test_an_answer_before_the_end_of_the_body_ends_the_connection() -> None:
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        connections.append(number)
        writer.write(OK)
        if number == 1:
            await writer.drain()
            await asyncio.sleep(0.2)  # the body fills the buffers meanwhile
            assert len(await reader.read()) < 64 << 20
            raise ConnectionError

    async with serving(serve) as (http, heads):
        assert await posted(http, bytes(64 << 20)) == b"ok"
        assert await posted(http) == b"ok"
        assert (connections, len(heads)) == ([1, 2], 2)


async def test_an_unfinished_answer_leaves_nothing_for_the_next_request() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nfor" if number == 1 else OK)
        if number == 1:
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.write(b"ged")

    async with serving(serve) as (http, _):
        response = await http.forward("POST", "/generate", [], b"")
        assert await response.read() == b"for"
        response.close()
        assert await posted(http) == b"ok"


async def test_a_caller_that_waits_for_a_head_no_longer_closes_the_connection() -> None:
    ended: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter, __: int) -> None:
        ended.append(await reader.read())
        raise ConnectionError

    async with serving(serve) as (http, heads):
        asking = asyncio.create_task(posted(http))
        await eventually(lambda: heads)
        asking.cancel()
        await eventually(lambda: ended == [b""])
        assert asking.cancelled()


UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nok"


async def test_an_answer_until_the_end_of_its_connection_is_whole_only_after_an_orderly_end() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(UNTIL_CLOSE)
        await writer.drain()
        await asyncio.sleep(0.1)
        if number == 2:
            reset = writer.get_extra_info("socket")
            reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        raise ConnectionError

    async with serving(serve) as (http, _):
        assert await posted(http) == b"ok"
        with pytest.raises(Broken):
            await posted(http)


@pytest.mark.parametrize("answer", [UNTIL_CLOSE, OK[:-1]])
async def test_an_answer_that_the_end_of_the_client_cuts_is_broken(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(answer)
        await reader.read()
        raise ConnectionError

    async with serving(serve) as (http, _):
        response = await http.forward("POST", "/generate", [], b"")
        assert await response.read()
        reading = asyncio.create_task(response.read())
        await asyncio.sleep(0)
        await http.close()
        with pytest.raises(Broken):
            await asyncio.wait_for(reading, 5)


@pytest.mark.parametrize("size", [1, (64 << 10) - 1, 64 << 10, 5 << 20])
async def test_bodies_of_every_size_arrive_whole(size: int) -> None:
    sent = bytes(range(256)) * (size // 256) + bytes(size % 256)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        assert await reader.readexactly(size) == sent
        writer.write(OK)

    async with serving(serve) as (http, _):
        assert [await posted(http, sent) for _ in range(2)] == [b"ok", b"ok"]


async def test_a_large_body_waits_for_a_slow_server() -> None:
    sent = bytes(range(256)) * (32 << 12)
    received = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await asyncio.sleep(0.1)
        while len(received) < len(sent):
            received.extend(await reader.read(8 << 20))
            await asyncio.sleep(0.001)
        writer.write(OK)

    async with serving(serve) as (http, _):
        asking = asyncio.create_task(posted(http, sent))
        await eventually(lambda: http._clients)
        (client,) = http._clients.values()
        await eventually(lambda: client._open)
        (connection,) = client._open
        await asyncio.sleep(0.05)
        assert len(connection._unsent) > len(sent) // 2  # not in the buffers of the transport
        assert await asking == b"ok"
        assert received == sent
        assert connection._unsent == b""


async def test_a_server_that_ends_its_side_and_reads_no_more_gives_no_answer() -> None:
    ended = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write_eof()
        await ended.wait()
        raise ConnectionError

    async with serving(serve) as (http, _):
        try:
            with pytest.raises(RlctlError) as lost:
                await asyncio.wait_for(posted(http, bytes(32 << 20)), 5)
        finally:
            ended.set()
    assert lost.value.reason is Reason.LINK_LOST


async def test_a_server_that_closes_during_the_handshake_is_named_so() -> None:
    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64 << 10)
        writer.close()

    server = await asyncio.start_server(closing, "127.0.0.1", 0)
    async with server:
        client = Client(connect_s=30, keep_s=1.0)
        origin = Origin("x", "127.0.0.1", server.sockets[0].getsockname()[1], ssl.create_default_context(), "x")
        with pytest.raises(NotConnected, match="ConnectionResetError"):
            await client.request(origin, "GET", "/", [], b"")


async def test_a_server_that_does_not_answer_the_handshake_is_not_connected() -> None:
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        client = Client(connect_s=0.2, keep_s=1.0)
        origin = Origin("x", "127.0.0.1", server.sockets[0].getsockname()[1], ssl.create_default_context(), "x")
        with pytest.raises(NotConnected, match=r"0\.2 s"):
            await client.request(origin, "GET", "/", [], b"")
        await asyncio.wait_for(ended.wait(), 5)


async def test_the_address_of_a_server_may_be_a_socket(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"Host: name:1\r\n" in head
        writer.write(OK)
        await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_unix_server(answering, tmp_path / "s")
    async with server:
        http = Http("SGLang", "http://user:secret@name:1", socket=str(tmp_path / "s"))
        assert await posted(http) == b"ok"
        await http.close()
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_new_connection_that_is_closed_is_a_lost_link() -> None:
    async def serve(_: asyncio.StreamReader, __: asyncio.StreamWriter, ___: int) -> None:
        raise ConnectionError

    async with serving(serve) as (http, heads):
        with pytest.raises(RlctlError) as lost:
            await posted(http)
        assert lost.value.reason is Reason.LINK_LOST
        assert len(heads) == 1


async def test_an_answer_that_breaks_off_is_not_taken_for_whole() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        await writer.drain()
        raise ConnectionError

    async with serving(serve) as (http, _):
        response = await http.forward("POST", "/generate", [], b"")
        assert await response.read() == b"ok"
        with pytest.raises(Broken):
            await response.read()


async def test_a_server_that_cannot_be_reached_got_nothing() -> None:
    async def serve(_: asyncio.StreamReader, __: asyncio.StreamWriter, ___: int) -> None:
        """Never called."""

    async with serving(serve) as (http, _):
        address = http.url
    with pytest.raises(RlctlError) as failed:
        await Http("vLLM", address).forward("POST", "/generate", [], b"")
    assert failed.value.reason is Reason.UNREACHABLE


async def test_closing_an_answer_closes_its_connection_and_an_idle_one_is_closed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_, "_KEEPALIVE_S", 0.1)
    ended: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(OK if number == 1 else b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        await reader.read(1)
        ended.append(number)
        raise ConnectionError

    async with serving(serve) as (http, _):
        assert await posted(http) == b"ok"
        await eventually(lambda: ended == [1])
        response = await http.forward("POST", "/generate", [], b"")
        assert await response.read() == b"ok"
        response.close()
        await eventually(lambda: ended == [1, 2])


async def test_an_answer_is_received_no_faster_than_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FLOW_BYTES", 1 << 10)
    total, sent = 64 << 20, 0

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(bytes(1 << 20))
            await writer.drain()
            sent += 1 << 20

    async with serving(serve) as (http, _):
        response = await http.forward("POST", "/generate", [], b"")
        assert await response.read()
        await asyncio.sleep(0.3)
        assert sent < total
        rest = await response.read_all()
        assert 0 < len(rest) < total
        assert sent == total


@pytest.mark.parametrize("header", ["a\r\nX-Other: b", "a\nb", "a\0b"])
async def test_a_header_with_a_line_break_is_not_sent(header: str) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(OK)

    async with serving(serve) as (http, heads):
        with pytest.raises(ValueError, match="line break"):
            await http.forward("POST", "/generate", [("X-Mine", header)], b"")
        assert not heads
