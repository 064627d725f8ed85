"""Answers of a server through a data port: the whole path, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict
from passing_suite import Gate
from raw_server import OK, Serve, serving
from rlctl_servers.adapters.lora_table import LoraTable
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.requests.requests import Requests
from rlctl_servers.server.http import Http
from rlctl_servers.updates.version_labels import Stamps
from rlctl_vllm.requests import passing
from rlctl_vllm.requests.bodies import Limits
from rlctl_vllm.requests.requests import TokensInOut
from waiting import eventually

from rlctl.engine import HttpExchange, HttpRequest
from rlctl.ports import SystemClock
from rlctl.runtime.http_errors import REASON
from rlctl.stage.data_port.server import DataPort
from rlctl.v1.common_pb2 import STAGE_STATE_DIRTY, WeightVersion

ROUTE = "/v1/completions"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class World:
    """A server of single bytes, and a data port of vLLM in front of it."""

    url: str
    session: aiohttp.ClientSession
    gate: Gate
    requests: Requests
    stamps: Stamps
    heads: list[bytes]
    http: Http

    def post(self, **fields: Any) -> Any:
        return self.session.post(self.url + ROUTE, json={"prompt": [1], **fields})


@contextlib.asynccontextmanager
async def made(serve: Serve) -> AsyncIterator[World]:
    async with serving(serve) as (http, heads), aiohttp.ClientSession() as session:
        stamps, table, limits = Stamps("1@1"), LoraTable(), Limits(99, 99, 99)
        stamps.bind(WeightVersion(label="1", sequence=1))
        requests = Requests(TokensInOut(http, limits, stamps, table))
        reader = passing.Reader(limits, "served", lambda: {"model"}, table)
        passes = Passing(http, reader, requests, stamps, table)

        class Engine:
            async def exchange(self, request: HttpRequest) -> HttpExchange:
                return passes.read(request)

        gate, engine = Gate("1", 1), Engine()
        port = DataPort(lambda: engine, lambda: gate.serving, SystemClock())  # type: ignore[arg-type,return-value]
        url = f"http://{await port.start('127.0.0.1:0', passing.routes())}"
        try:
            yield World(url, session, gate, requests, stamps, heads, http)
        finally:
            await port.stop()


class Slow:
    """Begins a stream, and waits for the end of the connection."""

    def __init__(self, first: bytes) -> None:
        self.first = first
        self.ended = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(self.first)
        await reader.read()
        self.ended += 1
        raise ConnectionError


BEGINNINGS = [
    b"",
    b"HTTP/1.1 200 OK\r\n",
    JSON + b"Content-Length: 99\r\n\r\n{",
    JSON + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"{"),
    EVENTS + chunk(b"data: 1\n\n"),
]


@pytest.mark.parametrize("first", BEGINNINGS)
async def test_a_client_that_leaves_ends_its_request_at_the_server(first: bytes) -> None:
    server = Slow(first)
    async with made(server) as world:
        asking = await begun(world)
        assert (world.requests.active, server.ended) == (1, 0)
        asking.cancel()
        await eventually(lambda: server.ended == 1)
        assert not world.requests.active


async def begun(world: World) -> asyncio.Task[tuple[str, bytes]]:
    """Send a request, and return its call once the server has sent its first bytes."""
    asking = asyncio.create_task(read(world))
    await eventually(lambda: world.heads)
    await asyncio.sleep(0.05)
    return asking


async def read(world: World) -> tuple[str, bytes]:
    async with world.post(stream=True) as response:
        return response.headers.get(REASON, ""), await response.read()


@pytest.mark.parametrize("first", BEGINNINGS)
async def test_the_gate_ends_requests_at_the_server(first: bytes) -> None:
    server = Slow(first)
    async with made(server) as world:
        asking = await begun(world)
        world.gate.put(state=STAGE_STATE_DIRTY, vouched=False)
        await eventually(lambda: server.ended == 1)
        if b"event-stream" in first:
            with pytest.raises(aiohttp.ClientPayloadError):
                await asking
        else:
            assert (await asking)[0] == "STAGE_NOT_SERVING"
        assert not world.requests.active


async def test_an_answer_that_ends_behind_the_gate_is_not_passed_on() -> None:
    """The stage becomes DIRTY before its next look at the gate, and the server's answer comes then."""
    go_on = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        await go_on.wait()
        writer.write(JSON + b"Content-Length: 6\r\n\r\n[1, 2]")

    async with made(serve) as world:
        asking = asyncio.create_task(read(world))
        await eventually(lambda: world.heads)
        world.gate.put(state=STAGE_STATE_DIRTY, vouched=False)
        go_on.set()
        reason, body = await asking
        assert (reason, b"[1, 2]" in body) == ("STAGE_NOT_SERVING", False)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        JSON + b"Content-Length: 9\r\n\r\n[1]",
        JSON + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"[1]"),
        b"garbage\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_off_is_an_error(first: bytes) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(first)
        await writer.drain()
        raise ConnectionError

    async with made(serve) as world:
        reason, body = await read(world)
        error = json.loads(body)["error"]
        assert (reason, error["reason"]) == ("LINK_LOST", "LINK_LOST")
        assert error["next_step"] == "Send the request again."
        assert len(world.heads) == 1


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("head", [EVENTS, EVENTS.replace(b"text/event-stream", b"text/plain")])
async def test_a_stream_that_breaks_off_is_never_whole(head: bytes, *, reset: bool) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(head + chunk(b"data: 1\n\n"))
        await writer.drain()
        await asyncio.sleep(0.1)
        if reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        raise ConnectionError

    async with made(serve) as world, world.post(stream=True) as response:
        assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
        if head is EVENTS:
            assert b"LINK_LOST" in await response.content.readuntil(b"\n\n")
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_a_stream_comes_piece_by_piece_and_byte_for_byte() -> None:
    go_on = asyncio.Event()
    head = EVENTS.replace(b"\r\n\r\n", b"\r\nX-Mine: a\r\nX-Mine: b\r\nServer: x\r\nKeep-Alive: 5\r\n\r\n")

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(head + chunk(b'data: {"a":  1}\n\n'))
        await go_on.wait()
        go_on.clear()
        writer.write(chunk(b'data: {"weight_vers'))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(chunk(b'ion":"1@1"}\n\nno line') + b"0\r\n\r\n")

    async with made(serve) as world:
        for _ in range(2):
            async with world.post(stream=True) as response:
                assert await response.content.readany() == b'data: {"a":  1}\n\n'
                go_on.set()
                assert await response.read() == b'data: {"weight_version":"1"}\n\nno line'
            assert response.headers.getall("X-Mine") == ["a", "b"]
            assert not {"Keep-Alive", "Content-Length"} & set(response.headers)
            assert response.headers.getall("Server") != ["x"]


@pytest.mark.parametrize(
    ("status", "head", "body"),
    [
        (200, b"Content-Length: 14", b'{ "a": 1.00 }\n'),
        (200, b"Transfer-Encoding: chunked", chunk(b'{ "a": ') + chunk(b"1.00 }\n") + b"0\r\nX-T: 1\r\n\r\n"),
        (400, b"Content-Length: 14", b'{ "a": 1.00 }\n'),
        (503, b"Content-Length: 14", b'{ "a": 1.00 }\n'),
    ],
)
async def test_documents_are_passed_on_byte_for_byte(status: int, head: bytes, body: bytes) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%b\r\n\r\n%b" % (status, head, body))

    async with made(serve) as world:
        for _ in range(2):
            async with world.post() as response:
                assert (response.status, await response.read()) == (status, b'{ "a": 1.00 }\n')
                assert (response.headers["Content-Length"], REASON in response.headers) == ("14", False)


async def test_the_server_gets_repeated_headers_in_their_order_and_one_id() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(OK)

    sent = CIMultiDict([("X-A", "1"), ("X-Request-Id", "a"), ("X-A", "2"), ("X-Request-Id", "b")])
    async with made(serve) as world:
        async with world.session.post(world.url + ROUTE, json={"prompt": [1]}, headers=sent) as response:
            assert response.status == 200
        lines = world.heads[0].decode().split("\r\n")
    assert [line for line in lines if line.startswith("X-")] == ["X-A: 1", "X-A: 2", "X-Request-Id: a"]


async def test_an_answer_without_a_body_has_none() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    async with made(serve) as world, world.post() as response:
        assert (response.status, await response.read()) == (204, b"")


async def test_the_version_of_an_answer_is_read_once_it_may_be_passed_on() -> None:
    """While a probe runs, the engine has the label of a version that is not bound yet."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(JSON + b'Content-Length: 24\r\n\r\n{"weight_version":"2@2"}')

    async with made(serve) as world:
        world.requests.hold()
        asking = asyncio.create_task(read(world))
        await eventually(lambda: world.heads)
        await asyncio.sleep(0.2)
        assert not asking.done()
        world.stamps.bind(WeightVersion(label="two", sequence=2), "2@2")
        world.requests.release()
        assert await asking == ("", b'{"weight_version":"two"}')


async def test_a_server_that_cannot_be_reached_is_not_serving() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: int) -> None:
        writer.write(OK)

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        async with made(serve) as world:
            world.http._origin = world.http._origin._replace(port=closed.getsockname()[1])
            reason, _ = await read(world)
            assert (reason, world.heads, world.requests.active) == ("STAGE_NOT_SERVING", [], 0)
