"""Calls to a server that closes connections when it likes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from rlctl_servers.options import address
from rlctl_servers.server import http as http_
from rlctl_servers.server.admin_calls import Control
from rlctl_servers.server.http import Http

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import Call
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN
from tests.support.raw_server import OK, serving


@contextlib.asynccontextmanager
async def answering(app: web.Application) -> AsyncIterator[Http]:
    """Calls to an application."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    http = Http("vLLM", f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield http
    finally:
        await http.close()
        await runner.cleanup()


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


@pytest.mark.parametrize("event", [b"data: {half\n\n", b"data: [1]\n\n", b"data: " + b"1" * 9000 + b"\n\n"])
async def test_an_event_that_is_none_is_a_failure_of_the_server(event: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_, "_LINE_BYTES", 1024)

    async def generate(request: web.Request) -> web.Response:
        return web.Response(body=b'data: {"good": 1}\n\n' + event, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with answering(app) as http:
        events = http.stream("/generate", {})
        assert await anext(events) == {"good": 1}
        with pytest.raises(RlctlError) as failed:
            await anext(events)
        assert (failed.value.reason, failed.value.outcome) == (Reason.ANSWER_INVALID, OUTCOME_UNKNOWN)


@pytest.mark.parametrize("status", [301, 302, 307])
async def test_what_leads_elsewhere_has_done_nothing(status: int) -> None:
    """A proxy that asks to log in first, say: its page is no answer of the server's."""
    asked = []

    async def lead(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/login"})

    async def page(request: web.Request) -> web.Response:
        asked.append(request.method)
        return web.Response(text="log in")

    app = web.Application()
    app.router.add_post("/pause", lead)
    app.router.add_post("/generate", lead)
    app.router.add_route("*", "/login", page)
    async with answering(app) as http:
        answer = await http.call("/pause", {}, timeout_s=5.0)
        assert (answer.ok, answer.message) == (False, f"HTTP {status}: it leads to /login")
        with pytest.raises(RlctlError, match="it leads to /login") as failed:
            await anext(http.stream("/generate", {}))
        assert failed.value.metadata["status"] == str(status)
    assert asked == []


@pytest.mark.parametrize(
    "url", ["name:1", "ftp://name", "http://", "http://name:99999", "http://name:x", "http://[::1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(RlctlError, match="is no http address") as refused:
        address({"url": url}, ())
    assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, "options.url")


@pytest.mark.parametrize(
    "url",
    [
        *("http://me:secret@name:1", "ftp://me:secret@name", "http://me:secret@name:99999"),
        *("http://me:sec/secret@name:1", "http://me:secret#x@name"),
    ],
)
def test_an_address_with_a_password_is_refused_without_the_password(url: str) -> None:
    """Addresses appear in messages and logs, and the data port would not send the password."""
    with pytest.raises(RlctlError) as refused:
        address({"url": url}, ())
    assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, "options.url")
    assert "secret" not in str(refused.value)


async def test_a_host_name_that_cannot_exist_is_not_reached() -> None:
    http = Http("vLLM", f"http://{'a' * 70}.test:1")
    with pytest.raises(RlctlError) as failed:
        await http.call("/health", timeout_s=5.0)
    assert (failed.value.reason, failed.value.outcome) == (Reason.UNREACHABLE, OUTCOME_REJECTED)
    await http.close()


async def test_a_call_has_a_connection_of_its_own_unless_it_may_be_sent_again() -> None:
    """The outcome of a call on a connection that the server closes at that moment is unknown."""
    used: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        used.append(number)
        writer.write(OK)

    async with serving(serve) as (http, heads):
        for _ in range(2):
            await http.call("/health", timeout_s=5.0, admin=False)
        assert used == [1, 1]
        for _ in range(2):
            await http.call("/pause", timeout_s=5.0, method="POST")
        assert used == [1, 1, 2, 3]
        await http.call("/generate", timeout_s=5.0, method="POST", admin=False, reuse=True)
        assert used == [1, 1, 2, 3, 1]
        assert all(b"Authorization: Bearer k\r\n" in head for head in (heads[0], heads[-1]))


async def test_events_come_out_of_pieces_of_any_size() -> None:
    text = b'data: {"a": 1}\r\n\n: comment\ndata:{"a": 2}\n\ndata: [DONE]'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(text), number):
            piece = text[start : start + number]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    async with serving(serve) as (http, _):
        for _ in range(20):
            assert [event async for event in http.stream("/generate", {})] == [{"a": 1}, {"a": 2}]


async def test_a_host_that_takes_no_connection_was_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(2):  # nobody accepts: what comes past these is not even refused
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        http = Http("vLLM", f"http://127.0.0.1:{full.getsockname()[1]}")
        for asking in (http.call("/pause", {}, timeout_s=5.0), anext(http.stream("/generate", {}))):
            with pytest.raises(RlctlError) as failed:
                await asking
            assert (failed.value.reason, failed.value.outcome) == (Reason.UNREACHABLE, OUTCOME_REJECTED)
        await http.close()


async def test_a_server_that_is_told_something_late_is_not_stuck() -> None:
    """What is cleaned up when the time is up is told a server that is well."""

    async def late(request: web.Request) -> web.Response:
        await asyncio.sleep(0.1)
        return web.json_response({"success": True})

    app = web.Application()
    app.router.add_post("/continue_generation", late)
    async with answering(app) as http:
        given_up: list[RlctlError] = []
        call = Call("c", asyncio.get_running_loop().time() - 60.0)
        assert (await Control(http, given_up.append).tell("/continue_generation", {}, call=call)).ok
        assert given_up == []


async def test_loops_that_are_stuck_cost_a_close_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop must not take longer with each loop and each kind of connection."""
    monkeypatch.setattr(http_, "CONNECT_S", 0.5)
    free = threading.Event()
    app = web.Application()

    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    app.router.add_route("*", "/", answer)
    async with answering(app) as http:
        loops = [asyncio.new_event_loop() for _ in range(3)]
        threads = [threading.Thread(target=loop.run_forever, daemon=True) for loop in loops]
        for loop, thread in zip(loops, threads, strict=True):
            thread.start()
            for body in (None, {}):
                work = asyncio.run_coroutine_threadsafe(http.call("/", body, timeout_s=5), loop)
                await asyncio.wrap_future(work)
            loop.call_soon_threadsafe(free.wait)
        started = time.monotonic()
        await http.close()
        assert time.monotonic() - started < 2
        free.set()
        for loop, thread in zip(loops, threads, strict=True):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), loop))
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()
