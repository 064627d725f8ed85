"""Requests that the gateway forwards to data ports: plain HTTP servers stand in for those of the stages."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from ambiguous_requests import AMBIGUOUS, answers
from multidict import CIMultiDict
from trace_collector import PARENT, attributes, collecting
from waiting import eventually
from yarl import URL

from rlctl.contract.errors import Reason, RlctlError
from rlctl.contract.scopes import Grant, Scope
from rlctl.gateway.backend.data_ports import lists
from rlctl.gateway.backend.service import Generation
from rlctl.gateway.generation import passthrough
from rlctl.gateway.http.call import Call
from rlctl.gateway.http.dialect import Answer, Handler
from rlctl.runtime.http_errors import REASON, body_of, headers_of
from rlctl.stage.server import StageServer
from rlctl.testing.fake_engine import FakeEngine
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport import access_file
from rlctl.transport.access_file import Entry, TokenHash, hash_of
from rlctl.v1 import rollout_pb2 as rollout
from rlctl.v1.verbs_pb2 import ContinueGenerationRequest, PauseGenerationRequest

ROUTES = ("POST /generate", "POST /v1/chat/completions", "POST /v1/embeddings", "POST /v1/things/{id}/open")
BODY = b'{"text":  "caf\\u00e9",\n "nobody_knows" : {"a": [1, 2.50]}, "sampling_params": {"max_new_tokens": 3}}'
TOKEN = "a token made for this test"

Answering = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


async def plain(request: web.Request, body: bytes) -> web.StreamResponse:
    return web.json_response({"size": len(body)})


class Port:
    """A data port.

    Attributes:
        requests: method, path and query, headers and body of each request.
        answering: what it does with a request.
        ended: number of requests that ended because their client left.
    """

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.address = ""
        self.requests: list[tuple[str, str, Any, bytes]] = []
        self.answering: Answering = plain
        self.ended = 0

    async def __aenter__(self) -> Port:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{rest:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.method, request.raw_path, request.headers, body))
        try:
            return await self.answering(request, body)
        except asyncio.CancelledError:
            self.ended += 1
            raise


def refusing(error: RlctlError, times: int = 10**6) -> Answering:
    """Answers as the stage refuses, so many times."""
    refusals = iter(range(times))

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        if next(refusals, None) is None:
            return await plain(request, body)
        headers = {**headers_of(error), REASON: error.reason.name}
        return web.json_response(body_of(error), status=error.http_status, headers=headers)

    return answer


async def broken(request: web.Request, _: bytes) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(10)
    raise AssertionError("its client has left")


def streaming(*pieces: bytes | asyncio.Event, content_type: str = "text/event-stream", end: bool = True) -> Answering:
    """Writes the pieces one by one, waits for the events between them, and breaks off without an ``end``."""

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type, "X-RLCTL-Slot": "here"})
        await response.prepare(request)
        for piece in pieces:
            if isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                await response.write(piece)
        if not end:
            assert request.transport is not None
            request.transport.close()
        return response

    return answer


@pytest.fixture
def make_ports(make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``async with make_ports("ab") as (fleet, ports)``: stages with data ports of these ``routes``, by slot."""

    @asynccontextmanager
    async def make(
        slots: Sequence[str] = "ab", *, without: Sequence[str] = (), routes: Sequence[str] = ROUTES, **options: Any
    ) -> AsyncIterator[tuple[InProcessFleet, dict[str, Port]]]:
        registration = StageServer._registration
        async with AsyncExitStack() as stack:
            ports = {slot: await stack.enter_async_context(Port(slot)) for slot in slots if slot not in without}

            def with_port(server: StageServer, info: Any) -> Any:
                registered = registration(server, info)
                del registered.data_routes[:]
                registered.data_address = ""
                if port := ports.get(registered.slot):
                    registered.data_address = port.address
                    registered.data_routes.extend(routes)
                return registered

            monkeypatch.setattr(StageServer, "_registration", with_port)
            fleet = await stack.enter_async_context(make_fleet(**options, **dict.fromkeys(slots, 1)))
            yield fleet, ports

    return make


@pytest.fixture
async def both(make_ports: Callable[..., Any]) -> AsyncIterator[tuple[InProcessFleet, dict[str, Port]]]:
    async with make_ports("ab") as both:
        yield both


def total(ports: dict[str, Port]) -> int:
    return sum(len(port.requests) for port in ports.values())


async def ask(http: aiohttp.ClientSession, path: str = "/generate", body: bytes = BODY, **headers: str) -> Any:
    """Status, headers and body of an answer."""
    headers = {"Content-Type": "application/json", **headers}
    async with http.post(URL(path, encoded=True), data=io.BytesIO(body), headers=headers) as response:
        return response.status, response.headers, await response.read()


async def test_body_and_answer_stay_as_they_are(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    reply = b'{ "text" : "\\u00e9", "meta_info": {"new": 1.50} }\n'

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        headers = {"X-RLCTL-Slot": "b", "X-RLCTL-Weight-Version-Seq": "1", "X-Engine": "yes", "Keep-Alive": "timeout=9"}
        return web.Response(status=207, body=reply, headers={**headers, "Content-Type": "application/json"})

    for port in ports.values():
        port.answering = answer
    async with make_gateway(fleet) as (_, http):
        path = "/generate?a=b%2Fc&d=%20"
        status, headers, body = await ask(http, path, **{"X-Trace": "t", "Connection": "close, X-Hop", "X-Hop": "1"})
        assert (status, body) == (207, reply)
        assert headers["Content-Type"] == "application/json"
        assert (headers["X-RLCTL-Slot"], headers["X-RLCTL-Weight-Version-Seq"]) == ("b", "1")
        assert headers["X-Engine"] == "yes"
        assert not {"Keep-Alive", "Cache-Control", "X-RLCTL-Unknown-Fields"} & headers.keys()
        [(method, target, got, sent)] = [*ports["a"].requests, *ports["b"].requests]
        assert (method, target, sent) == ("POST", path, BODY)
        assert (got["X-Trace"], got["Content-Type"]) == ("t", "application/json")
        assert (got["X-RLCTL-Min-Version"], got["X-RLCTL-Wait"]) == ("1", "0")
        assert not {"X-Hop", "Keep-Alive"} & got.keys()


async def test_repeated_headers_stay_repeated_and_those_of_the_connection_stop_here(
    both: Any, make_gateway: Callable[..., Any]
) -> None:
    fleet, ports = both
    of_connection = [("Connection", "X-Hop"), ("Connection", "X-Other"), ("X-Hop", "1"), ("X-Other", "1")]
    repeated = [("X-Mine", "a"), ("X-Mine", "b"), ("X-Mine", "a")]

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        return web.Response(body=b"{}", headers=CIMultiDict([*of_connection, *repeated]))

    for port in ports.values():
        port.answering = answer
    async with make_gateway(fleet) as (_, http):
        sent = CIMultiDict([*of_connection, ("TE", "trailers"), ("Trailer", "X-T"), *repeated])
        async with http.post("/generate", data=BODY, headers=sent) as response:
            assert response.status == 200
        [(_, _, got, _)] = [*ports["a"].requests, *ports["b"].requests]
        for headers in (got, response.headers):
            assert headers.getall("X-Mine") == ["a", "b", "a"]
            assert not {"X-Hop", "X-Other", "TE", "Trailer"} & headers.keys()


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_a_request_without_a_certain_end_is_refused(
    both: Any, make_gateway: Callable[..., Any], name: str
) -> None:
    fleet, ports = both
    async with make_gateway(fleet) as (server, _):
        assert await answers(server.address, *AMBIGUOUS[name]) == [400]
        assert total(ports) == 0


@pytest.mark.parametrize(
    ("status", "content_type", "reply"),
    [
        (422, "application/json", b'{"detail": "engine"}'),
        (500, "text/plain; charset=utf-8", b"broken"),
        (200, "application/json", b"[" + b"1," * (passthrough.WHOLE_BYTES + 1) + b"1]"),
        (200, "audio/wav", bytes(100_000)),
    ],
)
async def test_every_answer_of_the_engine_is_the_clients(
    both: Any, make_gateway: Callable[..., Any], status: int, content_type: str, reply: bytes
) -> None:
    fleet, ports = both

    async def answer(request: web.Request, _: bytes) -> web.StreamResponse:
        return web.Response(status=status, body=reply, headers={"Content-Type": content_type})

    for port in ports.values():
        port.answering = answer
    async with make_gateway(fleet) as (_, http):
        got, headers, body = await ask(http)
        assert (got, body) == (status, reply)
        assert headers["Content-Type"] == content_type
        assert total(ports) == 1


async def test_a_stream_passes_as_it_comes(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    pieces = [b"data: 1\n\n", b": comment\n\ndata: {}", b"\n\ndata: [DONE]\n\n"]
    between = asyncio.Event()
    for port in ports.values():
        port.answering = streaming(pieces[0], between, *pieces[1:])
    async with make_gateway(fleet) as (server, http):
        async with http.post("/v1/chat/completions", data=b'{"model": "actor", "messages": []}') as response:
            assert await response.content.readany() == pieces[0], "before the rest has been sent"
            assert response.headers["Content-Type"] == "text/event-stream"
            assert "Cache-Control" not in response.headers
            assert server.generation.inflight == 1
            assert sum(server.generation.inflight_at(slot) for slot in "ab") == 1
            between.set()
            assert await response.content.read() == b"".join(pieces[1:])
        await eventually(lambda: not server.generation.inflight)
        assert server.generation.inflight_bytes == sum(server.generation.inflight_at(slot) for slot in "ab") == 0
        assert not server.generation.rollout("actor")._router._policy.sessions._homes, "its session was its own"


async def test_a_refused_request_waits_for_a_stage(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    refusal = Reason.STAGE_NOT_SERVING.error("a is paused")
    ports["a"].answering = ports["b"].answering = refusing(refusal, 3)
    async with make_gateway(fleet, retries=0) as (_, http):
        status, _, body = await ask(http)
        assert (status, json.loads(body)) == (200, {"size": len(BODY)})
        assert {sent for port in ports.values() for *_, sent in port.requests} == {BODY}
    ports["a"].answering = ports["b"].answering = refusing(refusal)
    async with make_gateway(fleet, timeout_s=0.5) as (_, http):
        status, headers, body = await ask(http)
        assert (status, json.loads(body)["error"]["reason"]) == (503, "NO_ROUTABLE_STAGE")
        assert headers["Retry-After"] == "1"


async def test_a_connection_that_breaks_before_the_answer_is_another_stages(
    both: Any, make_gateway: Callable[..., Any]
) -> None:
    fleet, ports = both
    ports["a"].answering = broken
    async with make_gateway(fleet) as (_, http):
        for _ in range(4):
            assert (await ask(http))[0] == 200
    assert len(ports["b"].requests) == 4
    ports["b"].answering = broken
    async with make_gateway(fleet, retries=2) as (server, http):
        before = total(ports)
        status, headers, body = await ask(http)
        assert (status, json.loads(body)["error"]["reason"]) == (503, "UNREACHABLE")
        assert headers["Retry-After"] == "1"
        assert total(ports) - before == 3
        assert server.generation.inflight == 0


async def test_a_request_that_was_aborted_at_its_stage_is_not_repeated(
    both: Any, make_gateway: Callable[..., Any]
) -> None:
    """Neither by the gateway nor by OpenAI's client, which repeats a 409: status and next step are the stage's."""
    fleet, ports = both
    aborted = Reason.CANCELLED.error("the request was aborted", next_step="Do not send it again.")
    aborted.http_status = 400
    for port in ports.values():
        port.answering = refusing(aborted)
    async with make_gateway(fleet) as (_, http):
        status, _, body = await ask(http)
        error = json.loads(body)["error"]
        assert (status, error["reason"], error["code"]) == (400, "CANCELLED", 400)
        assert error["next_step"] == "Do not send it again."
    assert total(ports) == 1


async def test_a_refusal_about_a_broken_engine_is_repeated_at_another_stage(
    both: Any, make_gateway: Callable[..., Any]
) -> None:
    fleet, ports = both
    lost = Reason.LINK_LOST.error("the connection to SGLang broke", next_step="Send the request again.")
    ports["a"].answering = refusing(lost)
    async with make_gateway(fleet) as (_, http):
        for _ in range(4):
            assert (await ask(http))[0] == 200
    assert len(ports["b"].requests) == 4
    ports["b"].answering = refusing(lost)
    async with make_gateway(fleet, retries=1) as (_, http):
        status, _, body = await ask(http)
        assert (status, json.loads(body)["error"]["next_step"]) == (503, "Send the request again.")


async def test_a_document_that_breaks_off_is_another_stages(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    ports["a"].answering = streaming(b'{"half":', content_type="application/json", end=False)
    async with make_gateway(fleet) as (_, http):
        for _ in range(4):
            assert (await ask(http))[0] == 200
    assert ports["a"].requests


async def test_what_a_stage_refuses_for_good_is_the_clients(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    for port in ports.values():
        port.answering = refusing(Reason.FIELD_INVALID.error("a token beyond the vocabulary", field="input_ids"))
    async with make_gateway(fleet) as (_, http):
        status, _, body = await ask(http)
        reply = json.loads(body)["error"]
        assert (status, reply["reason"], reply["field"]) == (400, "FIELD_INVALID", "input_ids")
        assert reply["cause"] == "a token beyond the vocabulary"
        assert total(ports) == 1


@pytest.mark.parametrize("reported", [False, True])
async def test_nothing_is_repeated_after_the_first_byte(
    both: Any, make_gateway: Callable[..., Any], reported: bool
) -> None:
    fleet, ports = both
    error = b'data: {"error": {"reason": "STAGE_NOT_SERVING"}}\n\n'
    for port in ports.values():
        port.answering = streaming(b"data: 1\n\n", *([error] if reported else []), end=False)
    async with make_gateway(fleet) as (server, http):
        async with http.post("/generate", data=BODY) as response:
            first = await response.content.readuntil(b"\n\n")
            last = await response.content.readuntil(b"\n\n")
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()
        assert first == b"data: 1\n\n"
        reason = json.loads(last.removeprefix(b"data: "))["error"]["reason"]
        assert reason == ("STAGE_NOT_SERVING" if reported else "UNREACHABLE")
        assert total(ports) == 1
        await eventually(lambda: not server.generation.inflight)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_its_request(both: Any, make_gateway: Callable[..., Any], begun: bool) -> None:
    fleet, ports = both
    for port in ports.values():
        port.answering = streaming(*([b"data: 1\n\n"] if begun else []), asyncio.Event())
    async with make_gateway(fleet) as (server, http):
        going = asyncio.ensure_future(ask(http))
        await eventually(lambda: total(ports) == 1)
        await asyncio.sleep(0.05)
        going.cancel()
        await eventually(lambda: ports["a"].ended + ports["b"].ended == 1)
        await eventually(lambda: not server.generation.inflight)


async def test_a_kept_connection_that_a_stage_has_closed_gets_no_request(
    make_ports: Callable[..., Any], make_gateway: Callable[..., Any]
) -> None:
    async def closing(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.json_response({"size": len(body)})
        await response.prepare(request)
        await response.write_eof()
        assert request.transport is not None
        request.transport.close()
        return response

    async with make_ports("a") as (fleet, ports), make_gateway(fleet, retries=0) as (_, http):
        ports["a"].answering = closing
        assert [(await ask(http))[0] for _ in range(5)] == [200] * 5
        assert len(ports["a"].requests) == 5


async def test_a_request_that_a_stage_may_have_begun_is_not_sent_to_it_again(
    make_ports: Callable[..., Any], make_gateway: Callable[..., Any]
) -> None:
    used: set[Any] = set()

    async def closing(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.transport in used:
            return await broken(request, body)
        used.add(request.transport)
        return await plain(request, body)

    async with make_ports("a") as (fleet, ports), make_gateway(fleet, retries=0) as (_, http):
        ports["a"].answering = closing
        assert (await ask(http))[0] == 200
        status, _, answer = await ask(http)
        assert (status, json.loads(answer)["error"]["reason"], len(ports["a"].requests)) == (503, "UNREACHABLE", 2)


@pytest.mark.parametrize("drain_s", [0.0, 3.0])
async def test_a_request_that_outlasts_the_drain_is_cut(
    both: Any, make_gateway: Callable[..., Any], drain_s: float
) -> None:
    fleet, ports = both
    for port in ports.values():
        port.answering = streaming(b"data: 1\n\n", asyncio.Event())
    async with make_gateway(fleet, drain_s=drain_s) as (server, http), http.post("/generate", data=BODY) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        began = time.monotonic()
        await asyncio.wait_for(server.stop(), 10)
        assert drain_s <= time.monotonic() - began < drain_s + 2.5
        with pytest.raises(aiohttp.ClientError):
            await response.read()
        await eventually(lambda: ports["a"].ended + ports["b"].ended == 1)


async def test_a_gateway_ends_with_the_last_request_of_its_drain(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    go_on = asyncio.Event()
    for port in ports.values():
        port.answering = streaming(b"data: 1\n\n", go_on, b"data: 2\n\n")
    async with make_gateway(fleet, drain_s=60.0) as (server, http), http.post("/generate", data=BODY) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        stopping = asyncio.ensure_future(server.stop())
        await asyncio.sleep(0.5)
        assert not stopping.done()
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(http)
        go_on.set()
        assert await response.read() == b"data: 2\n\n"
        await asyncio.wait_for(stopping, 10)


async def test_sessions_stay_at_one_stage(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    async with make_gateway(fleet) as (_, http):
        for number in range(8):
            for _ in range(3):
                await ask(http, **{"X-Session-ID": f"s{number}"})
                await ask(http, body=orjson.dumps({"text": "x", "session_id": f"s{number}"}))
        assert ports["a"].requests
        assert ports["b"].requests
        for port in ports.values():
            counts: dict[str, int] = {}
            for *_, headers, body in port.requests:
                name = headers.get("X-Session-ID") or orjson.loads(body)["session_id"]
                counts[name] = counts.get(name, 0) + 1
            assert set(counts.values()) == {6}
        status, _, body = await ask(http, body=b'{"text": "x", "session_id": 5}')
        assert (status, json.loads(body)["error"]["field"]) == (400, "session_id")


async def test_an_engines_address_is_that_stage(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    async with make_gateway(fleet) as (_, http):
        for path in ("/engines/b/generate?x=1", "/engines/b/v1/embeddings?x=1", "/engines/b/v1/things/7/open?x=1"):
            for _ in range(3):
                assert (await ask(http, path))[0] == 200
            assert ports["b"].requests[-1][1] == path.removeprefix("/engines/b")
        assert (len(ports["a"].requests), len(ports["b"].requests)) == (0, 9)
        for path in ("/engines/c/generate", "/engines/c/v1/embeddings"):
            status, _, body = await ask(http, path)
            assert (status, json.loads(body)["error"]["reason"]) == (404, "STAGE_NOT_FOUND")


async def test_a_fleet_with_a_stage_without_the_route_is_translated(
    make_ports: Callable[..., Any], make_gateway: Callable[..., Any]
) -> None:
    async with make_ports("ab", without="b") as (fleet, ports), make_gateway(fleet) as (_, http):
        for path in ("/generate", "/engines/a/generate"):
            status, headers, body = await ask(http, path)
            reply = json.loads(body)
            assert (status, len(reply["output_ids"])) == (200, 3)
            assert headers["X-RLCTL-Unknown-Fields"] == "nobody_knows"
        status, _, body = await ask(http, "/v1/embeddings")
        assert (status, json.loads(body)["error"]["reason"]) == (404, "VERB_UNKNOWN")
        assert not total(ports)


async def test_a_gateway_that_continues_translates(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    async with make_gateway(fleet, resume="continue") as (_, http):
        assert len(json.loads((await ask(http))[2])["output_ids"]) == 3
        assert not total(ports)
        assert (await ask(http, "/v1/embeddings"))[0] == 200, "nothing translates it"


async def test_omnis_generate_is_its_own(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    async with make_gateway(fleet, dialect="omni") as (_, http):
        status, _, body = await ask(http, body=b'{"prompt": "x", "sampling_params": {"max_tokens": 2}}')
        assert (status, len(json.loads(body)["output_ids"]), total(ports)) == (200, 2, 0)
        assert (await ask(http, "/v1/chat/completions", b'{"messages": []}'))[0] == 200
        assert total(ports) == 1


async def test_a_least_version_goes_with_it(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    ports["a"].answering = ports["b"].answering = refusing(Reason.VERSION_TOO_OLD.error("1 of 2"), 1)
    async with make_gateway(fleet, timeout_s=0.5, admission="any") as (_, http):
        await ask(http)
        await ask(http, **{"X-RLCTL-Min-Version": "1", "X-RLCTL-Wait": "100"})
        sent = [
            (got["X-RLCTL-Min-Version"], got["X-RLCTL-Wait"]) for port in ports.values() for *_, got, _ in port.requests
        ]
        assert set(sent) == {("0", "0"), ("1", "0")}
        before = total(ports)
        status, _, body = await ask(http, **{"X-RLCTL-Min-Version": "2"})
        assert (status, "at version 1 of 2" in body.decode()) == (503, True)
        status, _, body = await ask(http, **{"X-RLCTL-Min-Version": "two"})
        assert (status, json.loads(body)["error"]["field"]) == (400, "X-RLCTL-Min-Version")
        assert total(ports) == before


async def test_routes_that_no_dialect_has(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    async with make_gateway(fleet, dialect="vllm") as (_, http):
        assert (await ask(http, "/v1/embeddings", b'{"model": "actor", "input": "x"}'))[0] == 200
        assert (await ask(http, "/v1/embeddings", b""))[0] == 200
        form = aiohttp.FormData({"model": "actor"})
        form.add_field("file", bytes(10), filename="a.wav")
        async with http.post("/v1/things/x/open", data=form) as response:
            assert response.status == 200
        got = [each[2]["Content-Type"] for port in ports.values() for each in port.requests if "things" in each[1]]
        assert got[0].startswith("multipart/form-data; boundary=")
        status, _, body = await ask(http, "/v1/embeddings", b'{"model": "other"}')
        assert (status, json.loads(body)["error"]["reason"]) == (404, "MODEL_NOT_FOUND")
        assert (await ask(http, "/v1/things/x/y/open"))[0] == 404
        assert (await ask(http, "/v1/embeddings", b"{"))[0] == 400
        async with http.get("/v1/embeddings") as response:
            assert response.status == 404
        assert total(ports) == 3


def test_routes_have_placeholders() -> None:
    routes = ["POST /a", "GET /b/{id}", r"GET /c/{rest:.+}/d", r"GET /e/{year:\d{4}}"]
    for method, path, listed in (
        ("POST", "/a", True),
        ("GET", "/a", False),
        ("GET", "/b/x", True),
        ("GET", "/b/x/y", False),
        ("GET", "/b/", False),
        ("GET", "/c/x/y/d", True),
        ("GET", "/e/2026", True),
        ("GET", "/e/20", False),
    ):
        assert lists(routes, method, path) == listed, path


async def test_the_callers_token_goes_with_it(make_ports: Callable[..., Any], make_gateway: Callable[..., Any]) -> None:
    async with make_ports("a", token=TOKEN) as (fleet, ports), make_gateway(fleet) as (_, http):
        assert (await ask(http, "/v1/embeddings"))[0] == 401
        assert (await ask(http))[0] == 401
        assert not ports["a"].requests
        assert (await ask(http, Authorization=f"Bearer {TOKEN}"))[0] == 200
        assert ports["a"].requests[0][2]["Authorization"] == f"Bearer {TOKEN}"


async def test_a_request_is_aborted_by_its_rid(
    both: Any, make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, ports = both
    aborted, calls = asyncio.Event(), []
    loop = asyncio.get_running_loop()

    async def abort(engine: FakeEngine, request: rollout.AbortRequest) -> rollout.AbortResponse:
        calls.append(list(request.rids))
        if len(calls) == 1:  # it has overtaken the request
            return rollout.AbortResponse(unknown_rids=request.rids)
        loop.call_soon_threadsafe(aborted.set)
        return rollout.AbortResponse(aborted=1)

    monkeypatch.setattr(FakeEngine, "abort", abort)
    for port in ports.values():
        port.answering = streaming(aborted, b'{"finish_reason": "abort"}', content_type="application/json")
    async with make_gateway(fleet) as (_, http):
        mine = b'{"text": "x", "rid": "mine"}'
        going = asyncio.ensure_future(ask(http, body=mine))
        await eventually(lambda: total(ports) == 1)
        status, _, body = await ask(http, body=mine)
        assert (status, json.loads(body)["error"]["reason"]) == (400, "RID_IN_USE")
        assert (await ask(http, "/abort_request", b'{"rid": "mine"}'))[0] == 200
        status, _, body = await going
        assert (status, body) == (200, b'{"finish_reason": "abort"}')
        assert calls == [["mine"], ["mine"]]
        assert (await ask(http, body=mine))[0] == 200, "the name is free again"


async def test_a_request_that_waits_for_a_stage_is_aborted_too(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    await fleet.stub.PauseGeneration(PauseGenerationRequest())
    async with make_gateway(fleet) as (server, http):
        going = asyncio.ensure_future(ask(http, body=b'{"text": "x", "rid": "mine"}'))
        await eventually(lambda: server.generation.inflight)
        await asyncio.sleep(0.05)
        await ask(http, "/abort_request", b'{"rid": "mine"}')
        status, _, body = await going
        assert (status, json.loads(body)["error"]["reason"]) == (400, "CANCELLED")
        going = asyncio.ensure_future(ask(http))
        await eventually(lambda: server.generation.inflight)
        assert not total(ports)
        await fleet.stub.ContinueGeneration(ContinueGenerationRequest())
        assert (await going)[0] == 200


@pytest.mark.parametrize("begun", [False, True])
async def test_a_lost_stages_requests_end(
    both: Any, make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    fleet, ports = both
    ports["a"].answering = streaming(*([b"data: 1\n\n"] if begun else []), asyncio.Event())
    async with make_gateway(fleet) as (_, http):
        while not ports["a"].requests:
            going = asyncio.ensure_future(ask(http, **{"X-Session-ID": f"s{len(ports['b'].requests)}"}))
            await asyncio.wait([going], timeout=0.1)

        async def nothing() -> None:
            """A process that dies takes no leave."""

        stage = fleet.stages.pop("a")
        monkeypatch.setattr(stage, "_deregister", nothing)
        await stage.stop()
        if not begun:
            assert (await going)[0] == 200
            assert ports["b"].requests
        else:
            with pytest.raises(aiohttp.ClientPayloadError):
                await going
        await eventually(lambda: ports["a"].ended == 1)


async def test_a_gateway_takes_so_many_at_a_time(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    end = asyncio.Event()
    ports["a"].answering = ports["b"].answering = streaming(end, b"{}", content_type="application/json")
    async with make_gateway(fleet, max_inflight=1) as (server, http):
        going = asyncio.ensure_future(ask(http))
        await eventually(lambda: total(ports) == 1)
        assert server.generation.inflight_bytes == len(BODY)
        status, headers, body = await ask(http)
        assert (status, json.loads(body)["error"]["reason"]) == (503, "TOO_MANY_REQUESTS")
        assert headers["Retry-After"] == "1"
        end.set()
        assert (await going)[0] == 200


async def test_a_forwarded_request_has_a_place_of_its_caller_until_it_has_ended(
    make_ports: Callable[..., Any], make_gateway: Callable[..., Any], tmp_path: Path
) -> None:
    sampler = Entry("sampler", (Grant(Scope.ROLLOUT),), (TokenHash(hash_of("mine"), 0.0),), (), 1)
    access_file.write(tmp_path / "access.json", {"sampler": sampler})
    access_path = str(tmp_path / "access.json")
    mine = {"Authorization": "Bearer mine"}
    async with (
        make_ports("a", token=TOKEN, access_file=access_path) as (fleet, ports),
        make_gateway(fleet) as (server, http),
    ):
        counted = server.generation.quotas._in_flight
        ports["a"].answering = streaming(b"data: 1\n\n", asyncio.Event())
        async with http.post("/generate", data=BODY, headers=mine) as response:
            assert await response.content.readline() == b"data: 1\n"
            status, headers, body = await asyncio.wait_for(ask(http, **mine), 5)
            assert (status, json.loads(body)["error"]["reason"]) == (429, "QUOTA_EXCEEDED")
            assert headers["Retry-After"] == "1"
            assert total(ports) == 1, "the refused request stays here"
            assert counted == {"sampler": 1}
        await eventually(lambda: not counted)  # the client has left
        ports["a"].answering = streaming(b"data: 1\n\n", end=False)
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(http, **mine)
        await eventually(lambda: not counted)
        ports["a"].answering = plain
        for _ in range(2):
            assert (await ask(http, **mine))[0] == 200


async def test_an_answer_that_does_not_begin_in_time_is_ended(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    for port in ports.values():
        port.answering = streaming(asyncio.Event())
    async with make_gateway(fleet, timeout_s=0.2) as (_, http):
        status, _, body = await ask(http)
        assert (status, json.loads(body)["error"]["reason"]) == (504, "DEADLINE_EXCEEDED")
        await eventually(lambda: ports["a"].ended + ports["b"].ended == 1)
    late = asyncio.Event()
    for port in ports.values():
        port.answering = streaming(b"data: 1\n\n", late, b"data: 2\n\n")
    async with make_gateway(fleet, timeout_s=0.2) as (_, http):
        asyncio.get_running_loop().call_later(0.4, late.set)
        assert (await ask(http))[2] == b"data: 1\n\ndata: 2\n\n", "one that has begun goes on"


class Replacing:
    """Replaces the JSON of bodies."""

    def __init__(self, generation: Generation) -> None:
        del generation

    async def __call__(self, call: Call, handler: Handler) -> Answer:
        call.replace_json({**await call.json(), "text": "other"})
        return await handler(call)


async def test_a_middleware_replaces_the_body(both: Any, make_gateway: Callable[..., Any]) -> None:
    fleet, ports = both
    async with make_gateway(fleet, middleware_paths=(f"{__name__}:Replacing",)) as (_, http):
        await ask(http)
        large = {"text": "x", "input_ids": [[1, 2]] * 2, "pad": "x" * (3 << 20)}
        await ask(http, body=orjson.dumps(large))
        await ask(http, "/v1/embeddings", b'{"input": 1}')
    sent = sorted((body for port in ports.values() for *_, body in port.requests), key=len)
    assert sent == [
        b'{"input":1,"text":"other"}',
        orjson.dumps({**orjson.loads(BODY), "text": "other"}),
        orjson.dumps({**large, "text": "other"}),
    ]


async def test_a_large_body_gives_its_room_back_while_it_waits_for_its_answer(
    both: Any, make_gateway: Callable[..., Any]
) -> None:
    fleet, ports = both
    end = asyncio.Event()
    ports["a"].answering = ports["b"].answering = streaming(end, b"{}", content_type="application/json")
    async with make_gateway(fleet) as (server, http):
        body = orjson.dumps({"text": "x" * (3 << 20)})
        going = asyncio.ensure_future(ask(http, body=body))
        await eventually(lambda: total(ports) == 1, 20)
        assert (server.bodies.room.used, server.generation.inflight_bytes) == (0, len(body))
        end.set()
        assert (await going)[0] == 200
        assert [sent for port in ports.values() for *_, sent in port.requests] == [body]


async def test_the_engine_gets_the_trace_context_of_the_gateways_span_or_else_of_the_client(
    make_ports: Callable[..., Any], make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_ports("a") as (fleet, ports):
        path, headers = "/v1/chat/completions", {"traceparent": PARENT}
        async with make_gateway(fleet) as (_, http), http.post(path, data=BODY, headers=headers) as answer:
            assert answer.status == 200
        async with collecting(monkeypatch) as collector:
            async with make_gateway(fleet) as (_, http), http.post(path, data=BODY, headers=headers) as answer:
                assert answer.status == 200
            await collector.flush()
    passed, traced = [headers["traceparent"] for *_, headers, _ in ports["a"].requests]
    assert passed == PARENT
    (span,) = collector.spans["rlctl-gateway"]
    assert span.parent_span_id.hex() == PARENT[36:52]
    assert traced == f"{PARENT[:36]}{span.span_id.hex()}-01"
    expected = {"gen_ai.operation.name": "chat", "rlctl.slot": "a", "http.response.status_code": 200}
    assert expected.items() <= attributes(span).items()
