"""The sidecar in front of an upstream that the test answers for: what it asks, and what it does when things break."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from rlctl_servers.server import server as watched
from rlctl_vllm.sidecar import requests as sidecar_requests
from rlctl_vllm.sidecar.server import SidecarConfig, SidecarServer

from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.router.process import SglangRouter
from rlctl.runtime import http_bodies, http_limits
from tools.benchmark.sidecar.upstream import application


class Serving:
    """An application on a port."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, handler_cancellation=True)
        self.url = ""

    async def __aenter__(self) -> Serving:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


class Plain:
    """A vLLM without admin calls, over /v1/completions, that says a token and then nothing until it is left."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.left = asyncio.Event()
        self.second = asyncio.Event()
        self.app = web.Application()
        self.app.router.add_get("/openapi.json", self._told({"paths": {"/v1/completions": {}}}))
        models = {"data": [{"id": "m", "root": "/nowhere", "max_model_len": 100}]}
        self.app.router.add_get("/v1/models", self._told(models))
        self.app.router.add_get("/version", self._told({"version": "0"}))
        self.answer: Any = self._say_a_token
        self.app.router.add_post("/v1/completions", self._complete)

    def _told(self, value: Any) -> Any:
        async def tell(request: web.Request) -> web.Response:
            return web.json_response(value)

        return tell

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request)  # type: ignore[no-any-return]

    async def _say_a_token(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        if len(self.asked) == 2:
            self.second.set()
        response = web.StreamResponse()
        await response.prepare(request)
        logprobs = {"token_logprobs": [-0.5], "tokens": ["token_id:7"], "top_logprobs": [{"token_id:7": -0.5}]}
        choice = {"index": 0, "text": "t", "token_ids": [7], "logprobs": logprobs, "finish_reason": None}
        await response.write(b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n")
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return response


TOLD = web.AppKey("told", list[str])
"""What it was told, in order."""


HALF_LOADED = "half-loaded"
"""In the path of a checkpoint that such a vLLM fails to load."""


def keyed(key: str, model: str, *, without: str = "") -> web.Application:
    """A vLLM with admin calls, as far as the plug-in asks it when it attaches, whose models only a key shows.
    ``without``: a path that it does not have.
    """
    app = web.Application()

    def tell(path: str, value: Any) -> None:
        async def told(request: web.Request) -> web.Response:
            if path == "/v1/models" and request.headers.get("Authorization") != f"Bearer {key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            return web.json_response(value)

        if path != without:
            app.router.add_route("*", path, told)

    async def rpc(request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["method"] == "rlctl_call":
            return web.json_response({"error": {"message": "no rlctl_call"}}, status=500)
        if HALF_LOADED in str(asked):
            return web.json_response({"error": {"message": "CUDA error"}}, status=500)
        return web.json_response({"results": [None]})

    @web.middleware
    async def noting(request: web.Request, handler: Any) -> Any:
        app[TOLD].extend([request.path_qs] * (request.method == "POST"))
        return await handler(request)

    app.middlewares.append(noting)
    app[TOLD] = []
    names = ("pause", "resume", "collective_rpc", "update_weight_version", "sleep", "wake_up")
    more = ("release_kv_cache_memory", "inference/v1/generate", "abort_requests", "reset_prefix_cache")
    paths = [f"/{name}" for name in (*names, *more)]
    for name in ("pause", "resume", "update_weight_version", "sleep", "wake_up", "release_kv_cache_memory"):
        tell(f"/{name}", {})
    app.router.add_post("/collective_rpc", rpc)
    tell("/metrics", "")
    tell("/reset_prefix_cache", {"success": True})
    tell("/openapi.json", {"paths": {path: {} for path in paths}})
    tell("/v1/models", {"data": [{"id": "m", "root": model, "max_model_len": 100}]})
    tell("/version", {"version": "0"})
    tell("/weight_info", {"weight_version": "default"})
    tell("/server_info", {"vllm_config": {"model_config": {"max_model_len": 100, "enable_sleep_mode": True}}})
    tell("/health", {})
    tell("/is_paused", {"is_paused": False})
    return app


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def started(config: SidecarConfig) -> SidecarServer:
    server = SidecarServer(config)
    await server.start()
    return server


async def test_no_body_is_parsed_twice(session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Serving(application()) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, coordinator="c:1"))
        parsed: list[bytes] = []
        loads = orjson.loads

        def counted(data: bytes) -> Any:
            parsed.append(data)
            return loads(data)

        monkeypatch.setattr(orjson, "loads", counted)
        body = orjson.dumps({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True})
        async with session.post(f"{sidecar.url}/generate", data=body) as response:
            answer = loads(await response.read())
        assert response.status == 200
        assert parsed[0] == body
        assert len(parsed) == 2, "the caller's body, and vLLM's answer"
        meta = answer["meta_info"]
        assert (meta["weight_version"], meta["completion_tokens"]) == (1, 3)
        assert meta["output_token_logprobs"][0] == [-0.5, 7, None]
        await sidecar.stop()


async def test_without_admin_calls_an_abort_closes_connections_and_keeps_what_came(
    session: aiohttp.ClientSession,
) -> None:
    plain = Plain()
    async with Serving(plain.app) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url))
        body = {"input_ids": [5], "sampling_params": {"temperature": 0}, "return_logprob": True, "top_logprobs_num": 1}
        async with session.post(f"{sidecar.url}/generate", json={**body, "stream": True, "rid": "s"}) as streamed:
            first = await streamed.content.readline()  # it runs
            assert b'"output_ids":[7]' in first
            asking = asyncio.create_task(session.post(f"{sidecar.url}/generate", json={**body, "rid": "w"}))
            await plain.second.wait()
            async with session.post(f"{sidecar.url}/abort_request", json={"abort_all": True}) as response:
                assert (await response.json())["aborted"] == 2
            rest = await streamed.text()
        assert '"type":"abort"' in rest
        async with await asking as response:
            answer = await response.json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert plain.left.is_set()
        assert plain.asked[0]["model"] == "m"
        assert plain.asked[0]["max_tokens"] == 99, "what fits, of the 128 that SGLang generates by itself"
        for path in ("/pause_generation", "/flush_cache"):
            async with session.post(sidecar.url + path, json={}) as response:
                assert (response.status, (await response.json())["error"]["reason"]) == (501, "UNSUPPORTED")
        await sidecar.stop()


@pytest.mark.parametrize("begun", [False, True])
async def test_an_answer_that_lacks_what_belongs_in_it_ends_a_stream(
    session: aiohttp.ClientSession, *, begun: bool
) -> None:
    plain = Plain()
    told: list[Any] = [{"choices": [{"index": 0, "text": "t", "token_ids": [7], "finish_reason": None}]}] * begun

    async def complete(request: web.Request) -> web.Response:
        events = b"".join(b"data: " + orjson.dumps(each) + b"\n\n" for each in [*told, {"choices": None}])
        return web.Response(body=events, content_type="text/event-stream")

    plain.answer = complete
    async with Serving(plain.app) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url))
        async with asyncio.timeout(5):
            body = {"input_ids": [5], "stream": True}
            async with session.post(f"{sidecar.url}/generate", json=body) as response:
                assert '"error"' in await response.text()
        await sidecar.stop()


async def test_a_caller_that_leaves_ends_its_request(session: aiohttp.ClientSession) -> None:
    plain = Plain()
    async with Serving(plain.app) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url))
        async with session.post(f"{sidecar.url}/generate", json={"input_ids": [5], "stream": True}) as response:
            await response.content.readline()
            response.close()
        await asyncio.wait_for(plain.left.wait(), 20)
        await sidecar.stop()


async def test_it_registers_with_a_router_until_that_takes_it() -> None:
    told: list[str] = []

    async def add(request: web.Request) -> web.Response:
        told.append(request.query["url"])
        if len(told) < 3:
            return web.json_response({"error": "starting"}, status=503)
        return web.json_response({"status": "success", "worker_urls": {told[-1]: 0}})

    router = web.Application()
    router.router.add_post("/add_worker", add)
    async with Serving(application()) as upstream, Serving(router) as at:
        config = SidecarConfig(upstream=upstream.url, coordinator="c:1", routers=(at.url,), advertise="127.0.0.1")
        sidecar = await started(config)
        await asyncio.wait_for(sidecar.registrations[0].registered.wait(), 30)
        assert told == [sidecar.url] * 3
        await sidecar.stop()


async def test_sglang_router_has_it_as_a_worker_until_it_leaves(tmp_path: Path) -> None:
    """The real one, which routes a request to it."""
    app = application()

    async def healthy(request: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/health", healthy)
    router = SglangRouter(policy="round_robin", log=tmp_path / "router.log")
    await asyncio.to_thread(router.start)

    async def until(wanted: set[str]) -> None:
        while (await asyncio.to_thread(router.workers)).keys() != wanted:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)

    try:
        async with Serving(app) as upstream, aiohttp.ClientSession() as session:
            config = SidecarConfig(upstream=upstream.url, coordinator="c:1", routers=(router.url,))
            sidecar = await started(config)
            await asyncio.wait_for(until({sidecar.url}), 30)
            body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
            async with session.post(f"{router.url}/generate", json=body) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
                assert len(answer["output_ids"]) == 4, answer
            await sidecar.stop()
            await asyncio.wait_for(until(set()), 30)
    finally:
        await asyncio.to_thread(router.stop)


async def test_an_answer_that_a_router_reads_and_writes_again_has_the_same_length(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime's does (``slime/router/router.py``), with Starlette's JSONResponse, and keeps the Content-Length."""
    app = web.Application()
    small = [{"token": "t", "logprob": value, "top_logprobs": []} for value in (-1.1920928955078125e-07, -1e-05, 0.0)]
    choice = {
        "index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": [7, 8, 9],
        "text": "\u00e9\u4e2d\u0001",
        "logprobs": {"content": small}, "weight_versions": [{"version": "1", "start": 0, "end": 3}],
    }  # fmt: skip

    async def generate(request: web.Request) -> web.Response:
        return web.json_response({"request_id": "r", "choices": [choice], "usage": {"prompt_tokens": 1}})

    app.router.add_post("/inference/v1/generate", generate)
    for route in application().router.routes():
        if route.method == "GET" and route.resource is not None:
            app.router.add_get(route.resource.canonical, route.handler)
    async with Serving(app) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, coordinator="c:1"))
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
        async with session.post(f"{sidecar.url}/generate", json=body) as response:
            said = await response.read()
        await sidecar.stop()
    entries = json.loads(said)["meta_info"]["output_token_logprobs"]
    assert [entry[0] for entry in entries] == [entry["logprob"] for entry in small]
    assert json.dumps(json.loads(said), ensure_ascii=False, separators=(",", ":")).encode() == said


async def test_admin_verbs_reach_a_vllm_that_asks_for_a_key(
    session: aiohttp.ClientSession, tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    app = keyed("secret", str(tiny[1]))
    (tmp_path / "key").write_text("secret")
    async with Serving(app) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, api_key_file=str(tmp_path / "key")))
        async with session.post(f"{sidecar.url}/pause_generation", json={}) as response:
            assert response.status == 200, await response.text()
        await sidecar.stop()


@pytest.fixture
async def driven(
    session: aiohttp.ClientSession, tiny: tuple[Any, Path], tmp_path: Path
) -> AsyncIterator[tuple[Callable[..., Any], list[str]]]:
    """A call to a sidecar that drives such a vLLM, and what that is told from then on."""
    app = keyed("secret", str(tiny[1]))
    (tmp_path / "key").write_text("secret")
    async with Serving(app) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, api_key_file=str(tmp_path / "key")))

        async def call(path: str, **body: Any) -> tuple[int, Any]:
            async with session.post(sidecar.url + path, json=body) as response:
                return response.status, await response.json()

        app[TOLD].clear()
        yield call, app[TOLD]
        await sidecar.stop()


async def test_a_pause_inside_an_update_outlasts_it(driven: tuple[Callable[..., Any], list[str]]) -> None:
    call, told = driven
    assert (await call("/begin_weight_update"))[0] == 200
    assert (await call("/pause_generation", mode="retract"))[0] == 200
    status, answer = await call("/end_weight_update")
    assert (status, answer["error"]["reason"]) == (400, "WEIGHTS_INCOMPLETE")
    assert "/resume" not in told
    assert (await call("/continue_generation"))[0] == 200
    assert told[-1] == "/resume"


async def test_an_update_between_the_weights_and_the_kv_cache(
    driven: tuple[Callable[..., Any], list[str]], tiny: tuple[Any, Path]
) -> None:
    """Generation goes on with the last of the memory, of which the update's end knows nothing else."""
    call, told = driven
    assert (await call("/release_memory_occupation"))[0] == 200
    assert (await call("/resume_memory_occupation", tags=["weights"]))[0] == 200
    status, answer = await call("/update_weights_from_disk", model_path=str(tiny[1]))
    assert status == 200, answer
    assert "/resume" not in told
    assert (await call("/resume_memory_occupation", tags=["kv_cache"]))[0] == 200
    assert told[-1] == "/resume"


async def test_the_update_after_one_that_failed_half_way_ends_its_pause(
    driven: tuple[Callable[..., Any], list[str]], tiny: tuple[Any, Path]
) -> None:
    call, told = driven
    half = shutil.copytree(tiny[1], tiny[1] / HALF_LOADED)  # a sidecar reads below its model
    try:
        status, answer = await call("/update_weights_from_disk", model_path=str(half))
    finally:
        shutil.rmtree(half)
    assert status != 200, answer
    assert "half-way" in (await call("/continue_generation"))[1]["message"]
    assert "/resume" not in told
    assert (await call("/update_weights_from_disk", model_path=str(tiny[1])))[0] == 200
    assert told[-1] == "/resume"


@pytest.mark.parametrize("flush", [True, False])
async def test_an_update_under_a_pause_in_place(
    driven: tuple[Callable[..., Any], list[str]], tiny: tuple[Any, Path], *, flush: bool
) -> None:
    """Requests that are frozen keep their entries from being flushed: they give them up."""
    call, told = driven
    assert (await call("/pause_generation", mode="in_place"))[0] == 200
    told.clear()
    assert (await call("/update_weights_from_disk", model_path=str(tiny[1]), flush_cache=flush))[0] == 200
    *_, after = ",".join(told).partition("/collective_rpc,/update_weight_version")
    assert after == ",/pause?mode=keep&clear_cache=true,/reset_prefix_cache?reset_external=true" * flush


async def test_a_vllm_that_is_not_driven_may_be_started_again(
    session: aiohttp.ClientSession, tiny: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plug-in that could not attach to it does not watch it."""
    monkeypatch.setattr(watched, "LOOK_S", 0.05)
    (tmp_path / "key").write_text("secret")
    async with Serving(keyed("secret", str(tiny[1]), without="/weight_info")) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, api_key_file=str(tmp_path / "key")))
        async with session.post(f"{sidecar.url}/pause_generation", json={}) as response:
            assert (await response.json())["error"]["reason"] == "UNSUPPORTED"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(sidecar.failed), 1)
    await sidecar.stop()


async def test_admin_verbs_ask_for_the_token(session: aiohttp.ClientSession) -> None:
    async with Serving(application()) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, coordinator="c:1", token="secret"))
        for header, status in (("", 401), ("Bearer other", 401), ("bearer secret", 403)):
            headers = {"Authorization": header} if header else {}
            async with session.post(f"{sidecar.url}/pause_generation", json={}, headers=headers) as response:
                assert response.status == status
        host, _, port = sidecar.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /pause_generation HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        await sidecar.stop()


async def test_too_many_samples_are_refused_before_they_are_made(session: aiohttp.ClientSession) -> None:
    async with Serving(application()) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, coordinator="c:1"))
        body = {"input_ids": [5], "sampling_params": {"n": (1 << 32) - 1}}
        async with asyncio.timeout(5), session.post(f"{sidecar.url}/generate", json=body) as response:
            assert (response.status, (await response.json())["error"]["field"]) == (400, "sampling_params.n")
        await sidecar.stop()


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"input_ids": [[5]] * 8193}, 400, "input_ids"),
        ({"input_ids": [[5]] * 3, "sampling_params": {"n": 4096}}, 400, "sampling_params.n"),
        ({"text": "x" * (1 << 20), "sampling_params": {"n": 300}}, 413, "body"),
        ({"input_ids": [5], "other": [[]] * (1 << 20)}, 413, "body"),
        ({"text": "x" * (65 << 20)}, 413, "body"),
    ],
    ids=["prompts", "samples", "bytes", "values", "body"],
)
async def test_what_one_call_may_ask_for_has_bounds(
    session: aiohttp.ClientSession, body: Any, status: int, field: str
) -> None:
    async with Serving(application()) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, coordinator="c:1"))
        async with session.post(f"{sidecar.url}/generate", data=io.BytesIO(orjson.dumps(body))) as response:
            assert (response.status, (await response.json())["error"]["field"]) == (status, field)
        await sidecar.stop()


async def test_samples_beyond_those_that_may_be_under_way_are_refused_at_once(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_requests, "MOST_RUNNING", 1)
    async with Serving(application()) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, coordinator="c:1"))
        for prompts, status in (([[5], [6]], 503), ([[5]], 200), ([[5]], 200)):
            body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}}
            async with session.post(f"{sidecar.url}/generate", json=body) as response:
                assert response.status == status
                if status == 503:
                    assert response.headers["Retry-After"] == "1"
                    assert (await response.json())["error"]["reason"] == "TOO_MANY_REQUESTS"
        await sidecar.stop()


async def test_a_large_batch_is_carried_out(session: aiohttp.ClientSession) -> None:
    prompts = [list(range(1, 900))] * 900
    async with Serving(application()) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, coordinator="c:1"))
        data = orjson.dumps({"input_ids": prompts, "sampling_params": {"max_new_tokens": 1}})
        assert len(data) > http_bodies.HUGE
        async with session.post(f"{sidecar.url}/generate", data=io.BytesIO(data)) as response:
            answers = await response.json()
        assert [each["meta_info"]["prompt_tokens"] for each in answers] == [899] * len(prompts)
        await sidecar.stop()


async def test_an_upstream_that_is_gone_is_said_to_be(session: aiohttp.ClientSession) -> None:
    async with Serving(application()) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, coordinator="c:1"))
    for path, body in (("/generate", {"input_ids": [5]}), ("/health", None)):
        async with session.request("POST" if body else "GET", sidecar.url + path, json=body) as response:
            assert response.status == 503
            assert (await response.json())["error"]["reason"] == "STAGE_NOT_SERVING"
    await sidecar.stop()


async def test_callers_that_say_half_are_cut_off(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", 0.3)
    monkeypatch.setattr(http_bodies, "READ_S", 0.3)
    whole = b"GET /model_info HTTP/1.1\r\nHost: x\r\n\r\n"

    async def trickle() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    async with Serving(application()) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url, coordinator="c:1"))
        for sent in (b"", whole[:20], whole + whole[:20]):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(sidecar.url.rpartition(":")[2]))
            writer.write(sent)
            async with asyncio.timeout(5):
                if len(sent) > len(whole):
                    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                    writer.write(whole[20:21])
                    await reader.read()
                else:
                    assert await reader.read() == b""
            writer.close()
        async with session.post(f"{sidecar.url}/generate", data=trickle()) as response:
            assert (response.status, (await response.json())["error"]["field"]) == (408, "body")
        await sidecar.stop()


@pytest.mark.parametrize(
    ("config", "reason", "field"),
    [
        (SidecarConfig(), Reason.FIELD_REQUIRED, "upstream"),
        (SidecarConfig(upstream="http://a", launch="b"), Reason.FIELD_CONFLICT, "launch"),
        (SidecarConfig(launch="b", coordinator="c:1"), Reason.FIELD_CONFLICT, "coordinator"),
        (SidecarConfig(upstream="http://a", arguments={"seed": "1"}), Reason.FIELD_CONFLICT, "arguments"),
    ],
)
async def test_settings_that_contradict_each_other(config: SidecarConfig, reason: Reason, field: str) -> None:
    with pytest.raises(RlctlError) as refused:
        SidecarServer(config)
    assert (refused.value.reason, refused.value.field) == (reason, field)


async def test_invalid_http_and_unknown_paths_are_refused_without_a_traceback(
    session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async with Serving(application()) as upstream:
        sidecar = await started(SidecarConfig(upstream=upstream.url))
        try:
            for method, path, status in (("GET", "/nothing", 404), ("POST", "/model_info", 405)):
                async with session.request(method, sidecar.url + path) as response:
                    assert response.status == status
                    assert (await response.json())["error"]["reason"] == "VERB_UNKNOWN"
            reader, writer = await asyncio.open_connection("127.0.0.1", int(sidecar.url.rpartition(":")[2]))
            writer.write(b"no HTTP\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
        finally:
            await sidecar.stop()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
