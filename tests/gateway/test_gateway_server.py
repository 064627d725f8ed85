"""What every dialect gets: bodies within bounds, errors as the dialect says them, tokens, middleware, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway import dialects
from rlctl.gateway.backend import tokenizers
from rlctl.gateway.backend.service import Generation
from rlctl.gateway.http import identity
from rlctl.gateway.http.bodies import Fields
from rlctl.gateway.http.call import UNKNOWN_FIELDS, Call
from rlctl.gateway.http.dialect import Answer, Dialect, Handler, Reply, Route, Scope, Stream
from rlctl.gateway.server import GatewayConfig, GatewayServer
from rlctl.runtime import http_bodies, http_limits
from rlctl.sdk import aio
from rlctl.testing.in_process_fleet import InProcessFleet

TOKEN = "a token made for this test"
FINISHED: list[str] = []
HUGE = 64 << 20
"""More bytes than sockets hold."""


async def echo(call: Call) -> Reply:
    fields = await call.fields()
    number = fields.take("number", int)
    return Reply({"number": number, "ids": [await call.request_id(), await call.request_id("second")]})


async def slow(call: Call) -> Reply:
    await asyncio.sleep(0.3)
    FINISHED.append(call.url)
    return Reply("done")


async def stream(call: Call) -> Stream:
    async def chunks() -> Any:
        if call.query.get("fail") == "first":
            raise Reason.FIELD_INVALID.error("no", field="fail")
        yield b"data: 1\n\n"
        if call.query.get("fail") == "later":
            raise Reason.ENGINE_FAILED.error("broken")
        if call.query.get("fail") == "defect":
            raise RuntimeError("a defect")
        yield b"data: 2\n\n"

    return Stream(chunks(), lambda error: f"data: {error.reason.name}\n\n".encode())


async def endless(call: Call) -> Stream:
    async def chunks() -> Any:
        try:
            while True:
                yield bytes(1 << 20)
        finally:
            FINISHED.append(call.url)

    return Stream(chunks(), lambda error: b"")


async def huge(call: Call) -> Reply:
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: FINISHED.append(call.url))  # once the answer is written
    return Reply(bytes(HUGE))


async def broken(call: Call) -> Reply:
    raise RuntimeError("a defect")


class Stamp:
    def __init__(self, generation: Generation) -> None:
        self.fleet = generation.fleet

    async def __call__(self, call: Call, handler: Handler) -> Answer:
        answer = await handler(call)
        assert isinstance(answer, Reply)
        return Reply(answer.body, answer.status, {"X-Stamp": "yes"})


@pytest.fixture(autouse=True)
def _dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, generation: Generation) -> Dialect:
        rows = [("echo", echo), ("broken", broken)]
        routes = [Route("POST", f"/{path}", handler, Scope.VIEWER) for path, handler in rows]
        routes += [Route("POST", "/change", echo), Route("POST", "/other", echo)]
        routes += [Route("POST", "/slow", slow), Route("POST", "/slow_read", slow, Scope.VIEWER)]
        routes += [Route("GET", "/endless", endless, Scope.ROLLOUT), Route("GET", "/huge", huge, Scope.VIEWER)]
        return Dialect(name, [*routes, Route("GET", "/stream", stream, Scope.ROLLOUT)], body_bytes=1000)

    monkeypatch.setattr(dialects, "load", load)


async def refusal(response: aiohttp.ClientResponse) -> dict[str, Any]:
    error: dict[str, Any] = (await response.json())["error"]
    return {"status": response.status, **error}


async def test_a_body_is_checked_by_type_and_unknown_fields_are_told(http: aiohttp.ClientSession) -> None:
    async with http.post("/echo", json={"number": 1, "nubmer": 2}) as response:
        assert response.status == 200
        assert (await response.json())["number"] == 1
        assert response.headers[UNKNOWN_FIELDS] == "nubmer"
    for body, field in (({}, "number"), ({"number": "x"}, "number"), ({"number": True}, "number"), ([], "body")):
        async with http.post("/echo", json=body) as response:
            said = await refusal(response)
            assert (said["status"], said["field"]) == (400, field), body
            assert UNKNOWN_FIELDS not in response.headers, "not all of them were looked at"
    async with http.post("/echo", data=b"{") as response:
        assert (await refusal(response))["status"] == 400
    async with http.post("/echo", data=b"x" * 2000) as response:
        assert (await refusal(response))["status"] == 413


async def test_what_is_not_there_is_said_in_the_dialects_words(http: aiohttp.ClientSession) -> None:
    async with http.post("/nothing") as response:
        assert (await refusal(response))["reason"] == "VERB_UNKNOWN"
        assert response.status == 404
    async with http.get("/echo") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
    async with http.post("/broken") as response:
        assert (await refusal(response))["reason"] == "INTERNAL"
        assert response.status == 500


async def test_a_slow_body_is_given_up(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bodies, "READ_S", 0.1)

    async def trickle() -> Any:
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    async with http.post("/echo", data=trickle()) as response:
        said = await refusal(response)
        assert (said["status"], said["field"]) == (408, "body")


async def test_a_repeat_under_a_key_has_the_same_ids(http: aiohttp.ClientSession) -> None:
    async def ids(path: str = "/change", **headers: str) -> list[str]:
        async with http.post(path, json={"number": 1}, headers=headers) as response:
            assert response.status == 200, await response.text()
            said: list[str] = (await response.json())["ids"]
            return said

    first, again = await ids(**{"Idempotency-Key": "step-1"}), await ids(**{"Idempotency-Key": "step-1"})
    other, none = await ids(**{"X-Request-Id": "step-2"}), await ids()
    assert first == again
    elsewhere, stranger = (
        await ids("/other", **{"Idempotency-Key": "step-1"}),
        await ids(**{"Idempotency-Key": "step-1", "Authorization": "Bearer another"}),
    )
    assert len({*first, *other, *none, *elsewhere, *stranger}) == 10
    own = "01890a5d-ac96-774b-bcce-b302099a8057"
    assert (await ids(**{"Idempotency-Key": own}))[0] == own
    read = await ids("/echo", **{"Idempotency-Key": "step-1"})
    assert read[0] not in first, "a read takes no key at the coordinator"


def test_the_id_of_a_step_is_a_uuid7_of_the_same_time() -> None:
    whole = "01890a5d-ac96-774b-bcce-b302099a8057"
    step = identity.derived(whole, "pause")
    assert step == identity.derived(whole, "pause") != identity.derived(whole, "continue")
    assert (step[:13], step[14]) == (whole[:13], "7")


async def test_failures_of_streams(http: aiohttp.ClientSession) -> None:
    async with http.get("/stream") as response:
        assert await response.text() == "data: 1\n\ndata: 2\n\n"
        assert response.content_type == "text/event-stream"
    async with http.get("/stream?fail=first") as response:
        assert (await refusal(response))["field"] == "fail"
    async with http.get("/stream?fail=later") as response:
        assert await response.text() == "data: 1\n\ndata: ENGINE_FAILED\n\n"
    async with http.get("/stream?fail=defect") as response:
        assert await response.text() == "data: 1\n\ndata: INTERNAL\n\n"


async def test_what_changes_something_goes_on_when_the_caller_leaves(http: aiohttp.ClientSession) -> None:
    FINISHED.clear()
    for path in ("/slow?changes", "/slow_read?reads"):
        with pytest.raises(TimeoutError):
            await http.post(path, timeout=aiohttp.ClientTimeout(total=0.1))
    await eventually(lambda: bool(FINISHED))
    await asyncio.sleep(0.3)
    assert FINISHED == ["/slow?changes"]


async def test_a_stop_lets_requests_end(fleet: InProcessFleet, make_gateway: Callable[..., Any]) -> None:
    async with make_gateway(fleet) as (server, http):
        running = asyncio.create_task(http.post("/slow_read"))
        await asyncio.sleep(0.1)
        await server.stop()
        assert (await running).status == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await http.post("/echo", json={"number": 1})


async def test_middleware_by_its_path(fleet: InProcessFleet, make_gateway: Callable[..., Any]) -> None:
    paths = ("test_gateway_server:Stamp", "test_gateway_server.Stamp")
    async with (
        make_gateway(fleet, middleware_paths=paths) as (_, http),
        http.post("/echo", json={"number": 1}) as response,
    ):
        assert response.headers["X-Stamp"] == "yes"
    for wrong in ("nowhere:Class", "test_gateway_server:Missing", "x", "test_gateway_server:TOKEN"):
        with pytest.raises(RlctlError) as caught:
            async with make_gateway(fleet, middleware_paths=(wrong,)):
                pass
        assert caught.value.field == "middleware_path"


def test_fields_within_fields_have_their_whole_path() -> None:
    fields = Fields({"info": {"port": "x", "names": ["a", 1]}})
    info = fields.take_fields("info")
    for take in (lambda: info.take("port", int), lambda: info.take_list("names", str), lambda: info.take("host", str)):
        with pytest.raises(RlctlError) as caught:
            take()
        assert caught.value.field in ("info.port", "info.names[1]", "info.host")
    assert Fields({"a": 1, "b": 2}).unknown == ["a", "b"]


# Connections.


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", 0.3)
    monkeypatch.setattr(http_limits, "WRITE_S", 0.3)


WHOLE = b"POST /slow_read HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


@asynccontextmanager
async def connected(
    http: aiohttp.ClientSession, limit: int = 1 << 16
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    assert http._base_url is not None
    reader, writer = await asyncio.open_connection(http._base_url.host, http._base_url.port, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def ends(reader: asyncio.StreamReader) -> bool:
    """Whether the other side ends it soon, having told nothing."""
    async with asyncio.timeout(5):
        return await reader.read() == b""


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("sent", [b"", WHOLE[:20], WHOLE[:40]])
async def test_a_caller_that_sends_no_whole_head_is_cut_off(http: aiohttp.ClientSession, sent: bytes) -> None:
    async with connected(http) as (reader, writer):
        writer.write(sent)
        assert await ends(reader)


@pytest.mark.usefixtures("hasty")
async def test_one_that_trickles_a_head_is_cut_off(http: aiohttp.ClientSession) -> None:
    async with connected(http) as (reader, writer):

        async def trickle() -> None:
            for byte in WHOLE:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.1)

        trickling = asyncio.create_task(trickle())
        assert await ends(reader)
        trickling.cancel()


@pytest.mark.usefixtures("hasty")
async def test_a_connection_is_kept_between_requests_but_not_for_half_of_one(http: aiohttp.ClientSession) -> None:
    async with connected(http) as (reader, writer):
        for pause in (0.0, 0.5):  # the request itself takes as long as a head may
            await asyncio.sleep(pause)
            writer.write(WHOLE)
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
        writer.write(WHOLE[:20])
        assert await ends(reader)


CHUNKED = b"POST /slow_read HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nT: t\r\n\r\n"
BARE = b"POST /slow_read HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("whole", [WHOLE, CHUNKED, BARE])
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_half_a_head_behind_whole_requests_has_the_time_of_a_head_from_its_next_byte(
    http: aiohttp.ClientSession, whole: bytes, size: int
) -> None:
    sent = 2 * whole + WHOLE[:20]
    async with connected(http) as (reader, writer):
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), size):
            writer.write(sent[at : at + size])
            await asyncio.sleep(0)
        for _ in range(2):
            assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200"), "these are answered, however late"
        writer.write(WHOLE[20:21])
        assert await ends(reader)


@pytest.mark.usefixtures("hasty")
async def test_half_a_head_behind_a_request_that_no_handler_sees_is_cut_off(http: aiohttp.ClientSession) -> None:
    async with connected(http) as (reader, writer):
        writer.write(WHOLE.replace(b"Host", b"Expect: what\r\nHost") + WHOLE[:20])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 417")
        writer.write(WHOLE[20:21])
        async with asyncio.timeout(5):
            await reader.read()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("chunked", [False, True])
async def test_the_rest_of_a_body_after_the_answer_is_no_head(http: aiohttp.ClientSession, chunked: bool) -> None:
    head, rest = (CHUNKED, b"{}\r\n0\r\n\r\n") if chunked else (WHOLE, b"{}")
    head = head[: head.index(b"{}")].replace(b"/slow_read", b"/nowhere")
    async with connected(http) as (reader, writer):
        writer.write(head)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        for at in range(len(rest)):
            writer.write(rest[at : at + 1])
            await asyncio.sleep(0)
        await asyncio.sleep(0.7)
        writer.write(WHOLE)
        assert b"HTTP/1.1 200" in await reader.readuntil(b"done")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("whole", [WHOLE, CHUNKED, BARE])
async def test_a_connection_is_kept_after_requests_that_came_together(
    http: aiohttp.ClientSession, whole: bytes
) -> None:
    async with connected(http) as (reader, writer):
        for _ in range(2):
            writer.write(2 * whole + b"\r\n")
            for _ in range(2):
                assert (await reader.readuntil(b"done")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.7)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("path", ["/endless", "/huge"])
async def test_a_caller_that_takes_nothing_of_an_answer_is_cut_off(http: aiohttp.ClientSession, path: str) -> None:
    FINISHED.clear()
    async with connected(http, limit=1) as (reader, writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await reader.readexactly(1)
        await eventually(lambda: path in FINISHED)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            async with asyncio.timeout(5):
                await reader.readexactly(HUGE)


@pytest.mark.usefixtures("hasty")
async def test_one_that_takes_it_slowly_is_not(http: aiohttp.ClientSession) -> None:
    async with connected(http) as (reader, writer):
        writer.write(b"GET /huge HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(16):
            await asyncio.sleep(0.05)
            await reader.readexactly(HUGE // 16)


class Wire(asyncio.Transport):
    """Of a caller that still reads an answer."""

    closed = False

    def close(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 1


async def test_a_next_request_waits_until_the_answer_before_is_read() -> None:
    guard, wire = http_limits.Guard(asyncio.Protocol()), Wire()
    guard.connection_made(wire)
    guard.begin()
    guard.end()
    guard.pause_writing()
    guard.data_received(WHOLE)
    guard._late()
    assert not wire.closed
    guard.resume_writing()
    guard.begin()
    guard.data_received(WHOLE)
    assert not guard._timers, "data of a body, or of a request that waits"
    guard.end()
    guard.data_received(WHOLE[:1])
    guard._late()
    assert wire.closed
    guard.connection_lost(None)


# Tokenizers.


async def test_tokenizers_are_read_from_the_start_if_wanted(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(tokenizers, "Tokenizer", lambda path: read.append(path) or path)
    for warm in (False, True):
        server = GatewayServer(GatewayConfig(fleet.server.address, warm=warm))
        try:
            await server.start()
            if warm:
                await eventually(lambda: bool(read))
                (known,) = (model.checkpoint for model in await server.fleet.models())
                assert read == [known]
                assert await server.generation.tokenizers.of("actor") == known
                assert read == [known], "a request finds it"
            else:
                assert not read
        finally:
            await server.stop()


async def test_a_slow_tokenizer_delays_no_request_for_another_model(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, read = threading.Event(), list[str]()

    def slow(path: str) -> str:
        read.append(path)
        if len(read) == 1:
            go_on.wait(20)
        return path

    monkeypatch.setattr(tokenizers, "Tokenizer", slow)
    async with await aio.connect(fleet.server.address) as client:
        known = tokenizers.Tokenizers(client, "directory")
        waiting = [asyncio.ensure_future(known.of("actor")) for _ in range(2)]
        await eventually(lambda: bool(read))
        async with asyncio.timeout(5):
            assert await known.of("critic") == "directory"
        waiting[0].cancel()
        go_on.set()
        assert await waiting[1] == "directory"
        assert await known.of("actor") == "directory"
    assert len(read) == 2, "each is read once"


async def test_a_missing_tokenizer_is_no_error_of_the_gateway_if_its_caller_has_disconnected(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def missing(path: str) -> None:
        begun.set()
        go_on.wait(20)
        raise Reason.CHECKPOINT_NOT_FOUND.error(path)

    monkeypatch.setattr(tokenizers, "Tokenizer", missing)
    async with await aio.connect(fleet.server.address) as client:
        known = tokenizers.Tokenizers(client)
        waiting = asyncio.ensure_future(known.of("actor"))
        await eventually(begun.is_set)
        waiting.cancel()
        await asyncio.wait([waiting])
        go_on.set()
        await eventually(lambda: not known._loading)
        await asyncio.sleep(0)
    gc.collect()  # asyncio reports errors that nobody has retrieved when their task is collected
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_tokenizer_that_cannot_be_read_from_the_start_ends_nothing(
    fleet: InProcessFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: str) -> None:
        raise RuntimeError(path)

    monkeypatch.setattr(tokenizers, "Tokenizer", broken)
    server = GatewayServer(GatewayConfig(fleet.server.address, warm=True))
    try:
        await server.start()
        assert server._warming is not None
        await asyncio.wait([server._warming])
        async with (
            aiohttp.ClientSession(f"http://{server.address}") as http,
            http.post("/echo", json={"number": 1}) as r,
        ):
            assert r.status == 200
    finally:
        await server.stop()


async def test_an_answer_that_is_being_sent_counts_as_a_request_of_the_drain() -> None:
    size = 64 << 20

    async def handle(request: web.Request) -> web.Response:
        del request
        return web.Response(body=bytes(size))

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, shutdown_timeout=http_limits.CUT_S)
    await runner.setup()
    site = http_limits.Site(runner, "127.0.0.1", 0)
    await site.start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0])
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    draining = asyncio.ensure_future(site.drain(30.0))
    await asyncio.sleep(0.3)
    assert not draining.done()
    assert len(await reader.readexactly(size)) == size
    await asyncio.wait_for(draining, 10)
    writer.close()
    await runner.cleanup()
