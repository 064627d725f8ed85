"""Noticing that a server is gone or stuck, and typed failures of calls; against plain sockets, without SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from rlctl_servers.server import server as watching
from rlctl_servers.server.http import Http
from rlctl_sglang.options import Options
from rlctl_sglang.server.server import Server

from rlctl.contract.errors import Reason, RlctlError
from rlctl.engine import EngineConfig
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[str, web.AppRunner]]:
    """A server that answers everything in one way; its address, and what ends it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", runner
    finally:
        await runner.cleanup()


async def fine(request: web.Request) -> web.StreamResponse:
    return web.json_response({})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_S", 0.05)
    monkeypatch.setattr(watching, "PROBE_S", 1.0)
    monkeypatch.setattr(watching, "SILENT_S", 1.5)


async def test_a_server_that_is_gone_is_noticed() -> None:
    ended: asyncio.Queue[RlctlError] = asyncio.Queue()
    async with serving(fine) as (url, runner):
        server = Server(EngineConfig("m"), Options(url=url), ended.put_nowait)
        await server.start()
        await runner.cleanup()
        error = await asyncio.wait_for(ended.get(), 30)
        await server.stop()
    assert error.reason is Reason.ENGINE_FAILED


@pytest.mark.parametrize(("status", "there"), [(502, False), (500, False), (503, True), (200, True)])
async def test_a_proxy_that_answers_for_it_is_not_taken_for_it(status: int, there: bool) -> None:
    ended: asyncio.Queue[RlctlError] = asyncio.Queue()
    now = 200

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=now)

    async with serving(answer) as (url, _):
        server = Server(EngineConfig("m"), Options(url=url), ended.put_nowait)
        await server.start()
        now = status
        if there:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ended.get(), 1.0)
        else:
            assert (await asyncio.wait_for(ended.get(), 30)).reason is Reason.ENGINE_FAILED
        await server.stop()


async def test_a_server_that_takes_connections_and_says_nothing_is_stuck() -> None:
    ended: asyncio.Queue[RlctlError] = asyncio.Queue()
    mute = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        if mute.is_set():
            await asyncio.sleep(3600)
        return web.json_response({})

    async with serving(handler) as (url, _):
        server = Server(EngineConfig("m"), Options(url=url), ended.put_nowait)
        await server.start()
        mute.set()
        error = await asyncio.wait_for(ended.get(), 30)
        await server.stop()
    assert error.reason is Reason.ENGINE_WEDGED


async def test_what_was_not_sent_had_no_effect_and_what_broke_off_is_unknown() -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with serving(cut) as (url, _):
        http = Http("SGLang", url)
        with pytest.raises(RlctlError) as broken:
            await http.call("/x", {}, timeout_s=5)
        assert (broken.value.reason, broken.value.outcome) == (Reason.LINK_LOST, OUTCOME_UNKNOWN)
    with pytest.raises(RlctlError) as refused:
        await http.call("/x", {}, timeout_s=5)
    assert (refused.value.reason, refused.value.outcome) == (Reason.UNREACHABLE, OUTCOME_REJECTED)
    await http.close()


async def test_a_stream_that_ends_early_says_so() -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b'data: {"text": "a"}\n\n')

    async with serving(half) as (url, _):
        http = Http("SGLang", url)
        with pytest.raises(RlctlError) as broken:
            assert [event async for event in http.stream("/generate", {})] == []
        assert broken.value.reason is Reason.LINK_LOST
        await http.close()
