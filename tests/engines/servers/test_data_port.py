"""The data port before an engine that answers as a test wants: routes, gate and ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from ambiguous_requests import AMBIGUOUS, answers
from multidict import CIMultiDict
from passed_answers import Pieces, answered, once
from passing_suite import Gate, post
from raw_server import serving
from rlctl_servers.adapters.lora_table import Held, LoraTable
from rlctl_servers.data_port.passing import Passing
from rlctl_servers.options import data_routes
from rlctl_servers.requests import requests as requests_
from rlctl_servers.requests import running
from rlctl_servers.requests.passed_bodies import Reading
from rlctl_servers.requests.requests import Requests
from rlctl_servers.updates.version_labels import Stamps
from rlctl_sglang.requests import passing
from rlctl_sglang.requests.bodies import Limits
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import Grant, Scope
from rlctl.engine import HttpExchange, HttpHead, HttpRequest, HttpRoute
from rlctl.ports import SystemClock
from rlctl.runtime.http_client import Response
from rlctl.runtime.http_errors import REASON
from rlctl.stage.data_port import server as server_
from rlctl.stage.data_port.server import DataPort
from rlctl.transport import access_file
from rlctl.transport.access_file import Entry, TokenHash, hash_of
from rlctl.v1.common_pb2 import STAGE_STATE_PAUSED, STAGE_STATE_READY
from rlctl.v1.verbs_pb2 import Adapter

ROUTES = [HttpRoute("POST", "/generate"), HttpRoute("GET", "/v1/models/{id}", gated=False)]


class Engine:
    """An engine that answers with its name and the request that it received."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def exchange(self, request: HttpRequest) -> HttpExchange:
        text = f"{self.name} {request.target} {request.path} {sorted(name for name, _ in request.headers)}"
        return Pieces("text/plain", once(text.encode()))


class World:
    """A port, its gate and its engine."""

    def __init__(self) -> None:
        self.gate = Gate("step", 7)
        self.engine: Any = Engine("first")
        self.looks = 0
        self.url = ""

    def serving(self) -> Any:
        self.looks += 1
        return self.gate.serving


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    port = DataPort(lambda: world.engine, world.serving, SystemClock(), token="secret")
    world.url = f"http://{await port.start('127.0.0.1:0', ROUTES)}"
    yield world
    await port.stop()


@pytest.fixture
async def call() -> AsyncIterator[Callable[..., Any]]:
    async with aiohttp.ClientSession() as session:
        yield lambda url, **more: post(session, url, more.pop("body", {}), "secret", **more)


@pytest.mark.parametrize("path", ["/generate?a=%31", "/%67enerate?a=%31"])
async def test_the_engine_gets_the_path_of_the_route(world: World, call: Any, path: str) -> None:
    answer = await call(world.url + path, **{"X-Api-Key": "k", "X-RLCTL-Wait": "1", "X-Mine": "m"})
    first, target, read, *headers = answer.body.decode().split(" ", 3)
    assert (first, target, read) == ("first", "/generate?a=%31", "/generate")
    assert "X-Mine" in headers[0]
    assert not {"X-Api-Key", "Authorization", "X-RLCTL-Wait", "Host"} & set(headers[0].split("'"))


@pytest.mark.parametrize("value", ["7.5", "7.0", "-1", "", "seven", "1" * 19])
async def test_a_least_version_is_a_sequence_number(world: World, call: Any, value: str) -> None:
    refused = await call(f"{world.url}/generate", **{"X-RLCTL-Min-Version": value})
    assert (refused.status, refused.headers.get(REASON)) == (400, "FIELD_INVALID")
    assert json.loads(refused.body)["error"]["field"] == "X-RLCTL-Min-Version"


async def test_a_name_in_the_path_stays_one_segment(world: World, call: Any) -> None:
    answer = await call(world.url + "/v1/models/..%2Fflush", method="GET")
    assert b"/v1/models/..%2Fflush " in answer.body


async def test_a_token_is_asked_for_but_not_for_the_health(world: World) -> None:
    async with aiohttp.ClientSession() as session:
        assert (await post(session, world.url + "/generate", {})).headers[REASON] == "TOKEN_MISSING"
        assert (await post(session, world.url + "/health", None, method="GET")).status == 200


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_a_request_without_a_certain_end_is_refused(name: str) -> None:
    read: list[HttpRequest] = []

    class Reads(Engine):
        async def exchange(self, request: HttpRequest) -> HttpExchange:
            read.append(request)
            return await super().exchange(request)

    world = World()
    world.engine = Reads("first")
    port = DataPort(lambda: world.engine, world.serving, SystemClock())
    address = await port.start("127.0.0.1:0", ROUTES)
    try:
        assert await answers(address, *AMBIGUOUS[name]) == [400]
        assert not read
    finally:
        await port.stop()


async def test_the_engine_gets_repeated_headers_in_their_order(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, str]] = []

    async def exchange(engine: Engine, request: HttpRequest) -> HttpExchange:
        del engine
        got.extend(request.headers)
        return Pieces("text/plain", once(b"x"))

    monkeypatch.setattr(Engine, "exchange", exchange)
    repeated = [("X-A", "1"), ("X-B", "2"), ("X-A", "3"), ("X-A", "1")]
    headers = CIMultiDict([*repeated, ("Authorization", "Bearer secret")])
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{world.url}/generate", data=b"{}", headers=headers) as response,
    ):
        assert response.status == 200
    assert [pair for pair in got if pair[0] in ("X-A", "X-B")] == repeated


async def test_headers_of_the_connection_stop_at_the_port(world: World) -> None:
    sent = [("Connection", "X-Hop"), ("Connection", "X-Other"), ("X-Hop", "1"), ("X-Other", "1"), ("X-Mine", "m")]
    headers = CIMultiDict([*sent, ("TE", "trailers"), ("Authorization", "Bearer secret")])
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{world.url}/generate", data=b"{}", headers=headers) as response,
    ):
        names = (await response.text()).split(" ", 3)[3]
    assert "X-Mine" in names
    assert not {"X-Hop", "X-Other", "TE", "Connection"} & set(names.split("'"))


async def endless() -> AsyncGenerator[bytes, None]:
    while True:
        yield b"data: 1\n\n"
        await asyncio.sleep(0.01)


async def answers_endlessly(engine: Engine, request: HttpRequest) -> HttpExchange:
    del engine, request
    return Pieces("text/event-stream", endless())


async def breaks(*pieces: bytes) -> AsyncGenerator[bytes, None]:
    for piece in pieces:
        yield piece
    raise Reason.LINK_LOST.error("the connection to SGLang broke")


async def test_a_stream_that_breaks_before_its_first_piece_is_refused(
    world: World, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway sends a refused request to another stage."""
    pieces: list[bytes] = []

    async def exchange(engine: Engine, request: HttpRequest) -> HttpExchange:
        del engine, request
        return Pieces("text/event-stream", breaks(*pieces))

    monkeypatch.setattr(Engine, "exchange", exchange)
    refused = await call(world.url + "/generate")
    assert (refused.status, refused.headers.get(REASON)) == (503, "LINK_LOST")
    assert json.loads(refused.body)["error"]["cause"] == "the connection to SGLang broke"
    pieces.append(b"data: 1\n\n")
    with pytest.raises(aiohttp.ClientPayloadError):
        await call(world.url + "/generate")


async def test_the_gate_refuses_a_stream_without_a_piece(
    world: World, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exchange(engine: Engine, request: HttpRequest) -> HttpExchange:
        del engine, request
        return Pieces("text/event-stream", never())

    monkeypatch.setattr(Engine, "exchange", exchange)
    asking = asyncio.create_task(call(world.url + "/generate"))
    await asyncio.sleep(0.1)
    world.gate.put(lease_until=0.0)
    refused = await asyncio.wait_for(asking, 5)
    assert (refused.status, refused.headers.get(REASON)) == (503, "STAGE_NOT_SERVING")


async def never() -> AsyncGenerator[bytes, None]:
    await asyncio.sleep(60)
    yield b""


async def test_a_stream_without_a_piece_is_an_empty_answer(
    world: World, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def exchange(engine: Engine, request: HttpRequest) -> HttpExchange:
        del engine, request
        return Pieces("text/event-stream", once(b""))

    monkeypatch.setattr(Engine, "exchange", exchange)
    answer = await call(world.url + "/generate")
    assert (answer.status, answer.headers["Content-Type"], answer.body) == (200, "text/event-stream", b"")


class Named(Pieces):
    """An answer of this model."""

    def __init__(self, model: str) -> None:
        super().__init__("text/plain", once(model.encode()))
        self.model = model


async def test_a_route_without_the_gate_is_of_the_models_of_the_stage(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()

    async def exchange(engine: Engine, request: HttpRequest) -> HttpExchange:
        del engine
        assert isinstance(request.document, dict)
        return Named(request.document["model"])

    monkeypatch.setattr(Engine, "exchange", exchange)
    port = DataPort(lambda: world.engine, world.serving, SystemClock())
    url = f"http://{await port.start('127.0.0.1:0', [HttpRoute('POST', '/tokenize', gated=False)])}/tokenize"
    try:
        assert (await call(url, body={"model": "actor"})).body == b"actor"
        refused = await call(url, body={"model": "other"})
        assert (refused.status, refused.headers.get(REASON)) == (404, "MODEL_NOT_FOUND")
    finally:
        await port.stop()


class Silent(Pieces):
    """An engine's answer without an end, before or after the head."""

    def __init__(self, *, begins: bool) -> None:
        super().__init__("text/plain", never())
        self._begins = begins

    async def begin(self) -> HttpHead:
        if not self._begins:
            await asyncio.sleep(60)
        return await super().begin()


@pytest.mark.parametrize("begins", [False, True])
async def test_a_request_without_the_gate_ends_when_the_engine_is_silent(
    call: Any, monkeypatch: pytest.MonkeyPatch, *, begins: bool
) -> None:
    monkeypatch.setattr(server_, "OPEN_S", 0.5)
    world = World()

    async def exchange(engine: Engine, request: HttpRequest) -> HttpExchange:
        del engine, request
        return Silent(begins=begins)

    monkeypatch.setattr(Engine, "exchange", exchange)
    port = DataPort(lambda: world.engine, world.serving, SystemClock())
    routes = [HttpRoute("POST", "/tokenize", gated=False)]
    url = f"http://{await port.start('127.0.0.1:0', routes)}/tokenize"
    try:
        asking = asyncio.create_task(call(url, body={"text": "a" * 300_000}))
        if begins:
            await eventually(lambda: port._bodies.room.used)
            await eventually(lambda: not port._bodies.room.used)
            assert not asking.done(), "the engine has read the body"
        answer = await asyncio.wait_for(asking, 5)
        assert (answer.status, answer.headers.get(REASON)) == (504, "DEADLINE_EXCEEDED")
        assert json.loads(answer.body)["error"]["next_step"] == "Send the request again."
        assert port._bodies.room.used == 0
    finally:
        await port.stop()


class Counted(Pieces):
    """An answer that counts in ``open`` until it is closed."""

    open = 0

    def __init__(self, pieces: AsyncGenerator[bytes, None], *, begins: bool = True) -> None:
        super().__init__("text/event-stream", pieces)
        self._begins = begins
        Counted.open += 1

    async def begin(self) -> HttpHead:
        if not self._begins:
            await asyncio.sleep(60)
        return await super().begin()

    def close(self) -> None:
        Counted.open -= 1


ENDS = [HttpRoute("POST", "/generate"), HttpRoute("POST", "/tokenize", gated=False)]


@pytest.fixture
async def ending(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[World, DataPort, asyncio.Event]]:
    """A port with an engine that sends one event, and a second one after the event."""
    world, go_on = World(), asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await go_on.wait()
        yield b"data: 2\n\n"

    async def exchange(engine: Engine, request: HttpRequest) -> HttpExchange:
        del engine
        return Counted(pieces(), begins=not request.target.endswith("?silent"))

    monkeypatch.setattr(Counted, "open", 0)
    monkeypatch.setattr(Engine, "exchange", exchange)
    port = DataPort(lambda: world.engine, world.serving, SystemClock())
    world.url = f"http://{await port.start('127.0.0.1:0', ENDS)}"
    yield world, port, go_on
    await port.stop()


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
async def test_a_forwarded_request_finishes_within_the_grace_and_no_further_one_is_accepted(
    ending: Any, path: str
) -> None:
    world, port, go_on = ending
    async with aiohttp.ClientSession() as session, session.post(world.url + path, json={}) as response:
        assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
        stopping = asyncio.create_task(port.stop(30.0))
        await asyncio.sleep(0.05)
        for refused_path, method in ((path, "POST"), ("/health", "GET")):
            refused = await post(session, world.url + refused_path, {} if method == "POST" else None, method=method)
            assert (refused.status, refused.headers.get(REASON)) == (503, "STAGE_NOT_SERVING")
            assert json.loads(refused.body)["error"]["cause"] == "the stage ends"
        assert not stopping.done()
        go_on.set()
        assert await response.read() == b"data: 2\n\n"
    await asyncio.wait_for(stopping, 5)
    assert Counted.open == 0


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
@pytest.mark.parametrize("grace_s", [0.0, 1.5])
async def test_a_forwarded_request_ends_with_an_error_and_at_the_engine_after_the_grace(
    ending: Any, grace_s: float, path: str
) -> None:
    world, port, _ = ending
    async with aiohttp.ClientSession() as session, session.post(world.url + path, json={}) as response:
        assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
        silent = asyncio.create_task(post(session, f"{world.url}{path}?silent", {}))
        await eventually(lambda: Counted.open == 2)
        rest = asyncio.create_task(response.content.readuntil(b"\n\n"))
        began = time.monotonic()
        await port.stop(grace_s)
        assert grace_s - 1 <= time.monotonic() - began < grace_s + 2
        assert Counted.open == 0
        last = await rest
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["reason"], error["cause"]) == ("STAGE_NOT_SERVING", "the stage ends")
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
        refused = await silent
        assert (refused.status, refused.headers.get(REASON)) == (503, "STAGE_NOT_SERVING")


async def test_a_request_before_the_engine_is_refused_when_the_port_ends(ending: Any) -> None:
    """It waits for the gate, or for its body."""
    world, port, _ = ending
    world.gate.put(state=STAGE_STATE_PAUSED)
    never_set = asyncio.Event()

    async def slowly() -> AsyncGenerator[bytes, None]:
        yield b"{"
        await never_set.wait()

    async def late_body(session: aiohttp.ClientSession) -> tuple[int, str | None]:
        async with session.post(world.url + "/generate", data=slowly()) as response:
            return response.status, response.headers.get(REASON)

    async with aiohttp.ClientSession() as session:
        waiting = asyncio.create_task(post(session, world.url + "/generate", {}))
        late = asyncio.create_task(late_body(session))
        await eventually(lambda: len(port._waiting) == 2)
        await asyncio.wait_for(port.stop(30.0), 5)
        refused = await waiting
        assert (refused.status, refused.headers.get(REASON)) == (503, "STAGE_NOT_SERVING")
        assert await late == (503, "STAGE_NOT_SERVING")


async def test_a_caller_that_reads_nothing_does_not_hold_the_end(ending: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def much() -> AsyncGenerator[bytes, None]:
        while True:
            yield bytes(1 << 20)

    async def exchange(engine: Engine, request: HttpRequest) -> HttpExchange:
        del engine, request
        return Counted(much())

    world, port, _ = ending
    monkeypatch.setattr(Engine, "exchange", exchange)
    async with aiohttp.ClientSession() as session, session.post(world.url + "/generate", json={}):
        await asyncio.sleep(0.3)
        await asyncio.wait_for(port.stop(0.2), 5)
        await eventually(lambda: not Counted.open)


async def test_an_answer_ends_with_the_token_of_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_file, "LOOK_S", 0.0)
    file = tmp_path / "access.json"
    sampler = Entry("sampler", (Grant(Scope.ROLLOUT),), (TokenHash(hash_of("mine"), 0.0),))
    access_file.write(file, {"sampler": sampler})
    gate, engine = Gate("step", 7), Engine("first")
    monkeypatch.setattr(Engine, "exchange", answers_endlessly)
    port = DataPort(lambda: engine, lambda: gate.serving, SystemClock(), access_file=str(file))  # type: ignore[arg-type,return-value]
    url = f"http://{await port.start('127.0.0.1:0', ROUTES)}/generate"
    async with (
        aiohttp.ClientSession(headers={"authorization": "Bearer mine"}) as session,
        session.post(url, json={}) as response,
    ):
        assert await response.content.readline() == b"data: 1\n"
        access_file.write(file, {})
        last = b""
        with suppress(aiohttp.ClientPayloadError):  # the connection is closed without the last chunk
            async with asyncio.timeout(5):
                while line := await response.content.readline():
                    last = line if line.startswith(b"data: ") else last
    assert b"TOKEN_INVALID" in last
    await port.stop()


async def test_requests_beyond_the_quota_of_their_caller_are_refused_and_each_end_frees_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_file, "LOOK_S", 0.0)
    file = tmp_path / "access.json"

    def write(limit: int | None) -> None:
        tokens = (TokenHash(hash_of("mine"), 0.0),)
        access_file.write(file, {"sampler": Entry("sampler", (Grant(Scope.ROLLOUT),), tokens, (), limit)})

    write(2)
    gate, engine = Gate("step", 7), Engine("first")
    monkeypatch.setattr(Engine, "exchange", answers_endlessly)
    port = DataPort(lambda: engine, lambda: gate.serving, SystemClock(), access_file=str(file))  # type: ignore[arg-type,return-value]
    url = f"http://{await port.start('127.0.0.1:0', ROUTES)}"
    async with aiohttp.ClientSession(headers={"authorization": "Bearer mine"}) as session:
        open_answers = [await session.post(f"{url}/generate", json={}) for _ in range(2)]
        refused = await post(session, f"{url}/generate", {})
        assert (refused.status, refused.headers[REASON]) == (429, "QUOTA_EXCEEDED")
        assert refused.headers["Retry-After"] == "1"
        error = json.loads(refused.body)["error"]
        assert error["cause"] == "sampler has 2 requests in flight at this server; the quota is 2"
        assert "rlctl tokens limit" in error["next_step"]
        health = await post(session, f"{url}/health", None, method="GET")
        assert health.status == 200

        async def admitted() -> int:
            async with session.post(f"{url}/generate", json={}) as response:
                return response.status

        open_answers.pop().close()  # the caller leaves
        await eventually(lambda: port._quotas._in_flight == {"sampler": 1})
        assert await admitted() == 200
        await eventually(lambda: port._quotas._in_flight == {"sampler": 1})
        write(1)
        assert await admitted() == 429, "a changed quota applies to later requests"
        gate.put(lease_until=0.0)  # the gate cuts the answer
        await eventually(lambda: not port._quotas._in_flight)
        waiting = asyncio.create_task(admitted())
        await eventually(lambda: port._quotas._in_flight == {"sampler": 1})
        assert await admitted() == 429, "a request that waits for the gate is in flight"
        gate.put(lease_until=float("inf"))
        assert await waiting == 200
        write(None)
        assert await admitted() == 200
        for answer in open_answers:
            answer.close()
    await port.stop()


async def test_an_engine_that_was_started_again_meanwhile_gets_the_request(world: World, call: Any) -> None:
    world.gate.put(state=STAGE_STATE_PAUSED)
    waiting = asyncio.create_task(call(world.url + "/generate"))
    await asyncio.sleep(0.1)
    world.engine = Engine("second")
    world.gate.put(state=STAGE_STATE_READY)
    assert (await waiting).body.startswith(b"second")


async def test_many_that_wait_are_looked_at_together(world: World, call: Any) -> None:
    """Also where the lease is over, which no change of the state announces."""
    world.gate.put(lease_until=0.0)
    waiting = [asyncio.create_task(call(world.url + "/generate")) for _ in range(20)]
    await asyncio.sleep(0.2)
    before = world.looks
    await asyncio.sleep(1.0)
    assert world.looks - before < 100
    world.gate.put(lease_until=float("inf"))
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}


async def test_a_gate_that_opens_while_a_request_is_refused_lets_it_in(world: World, call: Any) -> None:
    world.gate.put(state=STAGE_STATE_PAUSED)
    paused, seen = world.gate.serving, 0

    def serving() -> Any:
        """Opens after the first look of a request."""
        nonlocal seen
        seen += 1
        if seen == 1:
            world.gate.put(state=STAGE_STATE_READY)
            return paused
        return world.gate.serving

    world.serving = serving  # type: ignore[method-assign]
    port = DataPort(lambda: world.engine, serving, SystemClock())
    url = f"http://{await port.start('127.0.0.1:0', ROUTES)}"
    try:
        began = time.monotonic()
        assert (await call(url + "/generate")).status == 200
        assert time.monotonic() - began < 10
    finally:
        await port.stop()


class Dialect:
    """A server that can end nothing."""

    product = "fake"
    ended: list[Any]

    def __init__(self) -> None:
        self.ended = []

    def admit_passed(self, *, prepared: bool) -> None:
        del prepared

    def ends(self, *, heard: bool) -> bool:
        return heard

    async def end(self, rids: Any) -> None:
        self.ended.append(rids)


async def chatter() -> bytes:
    await asyncio.sleep(0.01)
    return b"."


async def accepted(requests: Requests, reading: Reading, read: Callable[[], Awaitable[bytes]]) -> bytes:
    """Pass a request on; return the first part of the answer."""
    with requests.accept(reading) as passed:
        return await passed.next(read)


async def test_a_stream_whose_end_was_asked_for_ends_though_it_goes_on_to_say_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "ABORT_S", 0.2)
    requests = Requests(Dialect())  # type: ignore[arg-type]
    with requests.accept(Reading(rids=["r"])) as passed:
        assert await passed.next(chatter) == b"."
        assert await requests.abort(["r"], all_of_them=False) == (1, [])

        async def rest() -> None:
            while True:
                await passed.next(chatter)

        with pytest.raises(RlctlError) as ended:
            await asyncio.wait_for(rest(), 5)
    assert ended.value.reason is Reason.CANCELLED
    assert not requests.active


def test_routes_can_be_added_by_an_option() -> None:
    assert data_routes("POST /v1/responses, GET /mine") == (
        HttpRoute("POST", "/v1/responses"),
        HttpRoute("GET", "/mine"),
    )
    assert data_routes("") == ()
    for wrong in ("/mine", "POST mine", "DELETE /mine", "GET /health", "POST /a b", "POST /{x}"):
        with pytest.raises(RlctlError) as refused:
            data_routes(wrong)
        assert refused.value.field == "options.data_routes"


async def test_a_route_that_is_added_twice_is_one(call: Any) -> None:
    world = World()
    port = DataPort(lambda: world.engine, world.serving, SystemClock())
    url = f"http://{await port.start('127.0.0.1:0', [*ROUTES, *data_routes('POST /generate, POST /mine')])}"
    try:
        assert (await call(url + "/mine")).body.startswith(b"first /mine ")
    finally:
        await port.stop()


async def test_nothing_is_passed_on_while_a_probe_runs() -> None:
    """The server then computes with weights that are not verified yet."""
    requests = Requests(Dialect())  # type: ignore[arg-type]
    with requests.accept(Reading(rids=["r"])) as passed:
        assert await passed.next(chatter) == b"."
        requests.hold()
        coming = asyncio.ensure_future(passed.next(chatter))
        await asyncio.sleep(0.2)
        assert not coming.done()
        requests.release()
        assert await asyncio.wait_for(coming, 5) == b"."
        requests.hold()
        coming = asyncio.ensure_future(passed.next(chatter))
        await asyncio.sleep(0.1)
        await requests.abort(["r"], all_of_them=False)
        with pytest.raises(RlctlError) as ended:
            await asyncio.wait_for(coming, 5)
    assert ended.value.reason is Reason.CANCELLED


class Server:
    """An HTTP server that answers with the body that it got, and notes the adapter's users meanwhile."""

    def __init__(self, adapters: LoraTable) -> None:
        self.adapters = adapters
        self.users = -1

    async def forward(self, method: str, target: str, headers: Any, body: bytes) -> Response:
        del method, target, headers
        self.users = self.adapters.users("policy@2#1")
        return answered(body, "application/json")


async def test_a_request_with_an_adapter_gets_the_present_one_and_its_name_back() -> None:
    table, stamps = LoraTable(), Stamps("default")
    table.put(Held("policy@2#1", Adapter(name="policy", version="2"), 1, 1))
    server, requests = Server(table), Requests(Dialect())  # type: ignore[arg-type]
    reader = passing.Reader(Limits(100, 512, 500), "base")
    port = Passing(server, reader, requests, stamps, table)  # type: ignore[arg-type]
    document = {"prompt": "1", "model": "base:policy", "rid": "mine"}
    exchange = port.read(HttpRequest("POST", "/v1/completions", (), json.dumps(document).encode(), document))
    assert exchange.adapter == "policy"
    with closing(exchange):
        body = (await exchange.begin()).body
    assert body is not None
    assert b'"model":"base:policy","rid":"4:mine","lora_path":"policy@2#1","extra_key":"' in body
    assert (server.users, table.users("policy@2#1"), requests.active) == (1, 0, 0)
    table.drop("policy")
    late = port.read(HttpRequest("POST", "/v1/completions", (), json.dumps(document).encode(), document))
    with pytest.raises(RlctlError) as gone:
        await late.begin()
    assert gone.value.reason is Reason.ADAPTER_NOT_FOUND


async def silence() -> bytes:
    await asyncio.sleep(60)
    return b""


async def test_a_request_with_a_grammar_is_left_before_a_pause_and_may_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang answers the abort of such a request with a token of another prompt."""
    monkeypatch.setattr(requests_, "LEFT_S", 0.1)
    dialect = Dialect()
    requests = Requests(dialect)  # type: ignore[arg-type]
    reading = Reading(rids=["r"], engine_rids=["r"], prepared=True)
    asking = asyncio.ensure_future(accepted(requests, reading, silence))
    await asyncio.sleep(0)
    assert not await requests.end_prepared(asyncio.get_running_loop().time())
    assert await requests.end_prepared(asyncio.get_running_loop().time() + 5)
    with pytest.raises(RlctlError) as left:
        await asking
    assert left.value.reason is Reason.STAGE_NOT_SERVING
    assert (dialect.ended, requests.active) == ([], 0)


async def test_the_server_is_not_asked_to_end_a_request_with_a_grammar() -> None:
    dialect = Dialect()
    requests = Requests(dialect)  # type: ignore[arg-type]
    reading = Reading(rids=["r"], engine_rids=["r"], prepared=True)
    asking = asyncio.ensure_future(accepted(requests, reading, silence))
    await asyncio.sleep(0)
    assert await requests.abort(["r"], all_of_them=False) == (1, [])
    with pytest.raises(RlctlError) as ended:
        await asking
    assert (ended.value.reason, ended.value.http_status) == (Reason.CANCELLED, 400)
    assert dialect.ended == []


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
"""SGLang sends it before the grammar of the request is compiled."""
GRAMMAR = {"text": "1", "stream": True, "rid": "mine", "sampling_params": {"json_schema": "{}"}}


@asynccontextmanager
async def streamed(requests: Requests, *first: bytes) -> AsyncIterator[asyncio.Task[bytes]]:
    """Pass on a stream with a grammar, of which the server sends the head and then ``first``; yield the first read."""
    table = LoraTable()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        writer.write(STREAM + b"".join(first))
        await reader.read()

    async with serving(serve) as (http, _):
        port = Passing(http, passing.Reader(Limits(100, 512, 500), "base"), requests, Stamps("default"), table)
        exchange = port.read(HttpRequest("POST", "/generate", (), json.dumps(GRAMMAR).encode(), GRAMMAR))
        with closing(exchange):
            assert (await exchange.begin()).body is None
            reading = asyncio.ensure_future(exchange.read())
            await asyncio.sleep(0.05)
            yield reading
            reading.cancel()
            await asyncio.wait([reading])


async def test_a_stream_with_a_grammar_and_no_piece_is_left_before_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_, "LEFT_S", 0.1)
    dialect = Dialect()
    requests = Requests(dialect)  # type: ignore[arg-type]
    async with streamed(requests) as reading:
        ending = asyncio.ensure_future(requests.end_prepared(asyncio.get_running_loop().time() + 5))
        with pytest.raises(RlctlError) as left:
            await asyncio.wait_for(reading, 2)
        assert left.value.reason is Reason.STAGE_NOT_SERVING
    assert await ending
    assert (dialect.ended, requests.active) == ([], 0)


async def test_the_server_is_not_asked_to_end_a_stream_with_a_grammar_and_no_piece() -> None:
    dialect = Dialect()
    requests = Requests(dialect)  # type: ignore[arg-type]
    async with streamed(requests) as reading:
        assert await requests.abort(["mine"], all_of_them=False) == (1, [])
        with pytest.raises(RlctlError) as ended:
            await asyncio.wait_for(reading, 1)
        assert ended.value.reason is Reason.CANCELLED
    assert dialect.ended == []


async def test_a_stream_with_a_grammar_and_a_piece_continues_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_, "LEFT_S", 0.1)
    dialect = Dialect()
    requests = Requests(dialect)  # type: ignore[arg-type]
    async with streamed(requests, b"9\r\ndata: 1\n\n\r\n") as reading:
        assert await requests.end_prepared(asyncio.get_running_loop().time() + 5)
        assert (await reading, requests.active) == (b"data: 1\n\n", 1)
        assert await requests.abort(["mine"], all_of_them=False) == (1, [])
    assert dialect.ended == [["4:mine"]]


async def test_an_abort_waits_for_the_answer_of_the_server() -> None:
    """SGLang and vLLM answer it with the tokens so far."""

    async def answering() -> bytes:
        await asyncio.sleep(0.2)
        return b"aborted"

    dialect = Dialect()
    requests = Requests(dialect)  # type: ignore[arg-type]
    coming = asyncio.ensure_future(accepted(requests, Reading(rids=["r"], engine_rids=["e"]), answering))
    await asyncio.sleep(0)
    assert await requests.abort(["r"], all_of_them=True) == (1, [])
    assert await coming == b"aborted"
    assert dialect.ended == [None]


async def test_a_request_that_the_server_must_not_have_now_is_not_sent() -> None:
    class Pausing(Dialect):
        def admit_passed(self, *, prepared: bool) -> None:
            assert prepared
            raise Reason.STAGE_NOT_SERVING.error("about to be paused")

    requests = Requests(Pausing())  # type: ignore[arg-type]
    with pytest.raises(RlctlError) as refused:
        await accepted(requests, Reading(rids=["r"], prepared=True), chatter)
    assert refused.value.reason is Reason.STAGE_NOT_SERVING
    assert not requests.active


async def test_a_batch_is_one_request_however_many_ids_it_has() -> None:
    dialect = Dialect()
    requests = Requests(dialect)  # type: ignore[arg-type]
    ids = [f"id-{index}" for index in range(2000)]
    with requests.accept(Reading(rids=ids, engine_rids=ids, samples=2000)) as passed:
        await passed.next(chatter)
        assert (requests.active, requests.samples) == (1, 2000)
        began = time.monotonic()
        assert await requests.abort(["id-7", "other"], all_of_them=False) == (1, ["other"])
        assert time.monotonic() - began < 1
        assert dialect.ended == [ids]
    assert not requests.active
