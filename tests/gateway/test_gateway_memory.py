"""Large requests: a refused one leaves nothing behind, and one that is read keeps no other request waiting."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from waiting import eventually

from rlctl.contract import errors
from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.backend import service
from rlctl.gateway.generation import sglang
from rlctl.gateway.http.call import UNKNOWN_FIELDS, Call
from rlctl.rollout.sample import RolloutSample
from rlctl.runtime import http_bodies
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.channel import REFUSED_ABOVE_BYTES

TOO_LARGE = "x" * (REFUSED_ABOVE_BYTES + 1)
NO_ADAPTER = {"text": "x", "lora_path": "none"}
DIRECTORY = {"model_path": "/nowhere"}


@pytest.fixture
def uncollected() -> Iterator[None]:
    """The garbage collector does not run, and does not list what was there before."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def sent(body: Any) -> io.BytesIO:
    return io.BytesIO(json.dumps(body).encode())


def kept() -> list[object]:
    """Requests, samples, and errors with frames, that are left."""
    left = [each for each in gc.get_objects() if isinstance(each, Call | RolloutSample | RlctlError)]
    return [each for each in left if not isinstance(each, RlctlError) or each.__traceback__ is not None]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("dialect", "path", "body", "status"),
    [
        ("sglang", "/generate", {"text": TOO_LARGE}, 413),
        ("sglang", "/generate", {"text": TOO_LARGE, "stream": True}, 413),
        ("sglang", "/generate", {"text": ["x", "y", TOO_LARGE]}, 413),
        ("sglang", "/v1/completions", {"prompt": TOO_LARGE, "n": 2}, 413),
        ("vllm", "/inference/v1/generate", {"token_ids": [1 << 20] * (REFUSED_ABOVE_BYTES // 3 + 1)}, 413),
        ("sglang", "/generate", NO_ADAPTER, 404),
        ("sglang", "/generate", {**NO_ADAPTER, "text": ["x", "y"]}, 404),
        ("sglang", "/generate", {**NO_ADAPTER, "text": ["x", "y"], "stream": True}, 404),
        ("sglang", "/generate", {"text": "x", "sampling_params": {"n": "many"}}, 400),
        ("sglang", "/engines/none/generate", {"text": "x"}, 404),
        ("sglang", "/update_weights_from_disk", DIRECTORY, 400),
        ("sglang", "/end_weight_update", {}, 400),
        ("sglang", "/nothing", {}, 404),
        ("slime", "/add_worker", {"url": "http://127.0.0.1:1/engines/none"}, 404),
        ("omni", "/update_weights_from_disk", DIRECTORY, 502),
        ("omni", "/pause_generation", {"mode": "none"}, 422),
        ("vllm", "/collective_rpc", {"method": "none"}, 501),
        ("vllm", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}, 207),
    ],
)
async def test_a_refused_request_is_not_kept(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], dialect: str, path: str, body: Any, status: int
) -> None:
    async with make_gateway(fleet, dialect=dialect) as (_, http):
        async with http.post(path, data=sent(body)) as response:
            assert response.status == status, await response.text()
        await eventually(lambda: not kept())


@pytest.mark.usefixtures("uncollected")
async def test_a_body_that_comes_too_slowly_is_not_kept(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_bodies, "READ_S", 0.1)

    async def trickle() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    for path in ("/generate", "/pause_generation"):
        async with http.post(path, data=trickle()) as response:
            assert response.status == 408
        await eventually(lambda: not kept())


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/update_weights_from_disk"])
async def test_a_large_body_that_is_read_keeps_no_other_request_waiting(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    parse, begun, release = http_bodies.parsed, threading.Event(), threading.Event()

    def slow(data: bytes) -> Any:
        if len(data) >= http_bodies.LARGE:
            begun.set()
            assert release.wait(30)
        return parse(data)

    monkeypatch.setattr(http_bodies, "parsed", slow)
    large = json.dumps({"text": "x", "prompt": "x", "model_path": "/nowhere", "other": "x" * http_bodies.LARGE})
    posts = [asyncio.create_task(http.post(path, data=large)) for _ in range(2)]
    await eventually(begun.is_set)
    async with http.get("/health") as response:
        assert response.status == 200
    async with http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}}) as response:
        assert response.status == 200
    assert not any(post.done() for post in posts)
    release.set()
    for post in posts:
        (await post).close()


async def test_a_request_that_no_stage_takes_is_refused_before_samples_are_made(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(sglang.continuation, "begin", lambda *args, **more: begun.append(args))
    async with http.post("/generate", data=sent({"text": ["x", TOO_LARGE]})) as response:
        said = (await response.json())["error"]
    assert (response.status, said["reason"], said["field"]) == (413, "MESSAGE_TOO_LARGE", "text")
    assert not begun


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/abort_request"])
async def test_a_body_is_parsed_once(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    parse, parsed = http_bodies.parsed, []
    monkeypatch.setattr(http_bodies, "parsed", lambda data: parsed.append(data) or parse(data))
    body = {"mode": "abort", "model_path": "/nowhere", "abort_all": True, "unheard_of": 1}
    async with http.post(path, json=body) as response:
        assert len(parsed) == 1
        names = response.headers.get(UNKNOWN_FIELDS, "").split(", ")
    if response.status == 200:
        assert names.count("unheard_of") == 1


def ids(count: int) -> list[int]:
    return [40_000 + index for index in range(count)]


PROMPTS = [ids(900) for _ in range(512)]
"""Together a body that a process parses."""


async def test_prompts_of_token_ids_mean_the_same_in_a_large_body(
    fleet: InProcessFleet, make_gateway: Callable[..., Any]
) -> None:
    params = {"max_new_tokens": 2}
    one = ids(400_000)
    async with make_gateway(fleet) as (_, http):
        assert len(json.dumps({"input_ids": PROMPTS})) > http_bodies.HUGE < len(json.dumps({"input_ids": one}))
        async with http.post("/generate", data=sent({"input_ids": PROMPTS, "sampling_params": params})) as response:
            batch = await response.json()
        async with http.post("/generate", data=sent({"input_ids": PROMPTS[0], "sampling_params": params})) as response:
            single = await response.json()
        assert [each["output_ids"] for each in batch] == [single["output_ids"]] * len(PROMPTS)
        assert batch[0]["meta_info"]["prompt_tokens"] == len(PROMPTS[0])
        async with http.post("/v1/completions", data=sent({"prompt": PROMPTS, "max_tokens": 2})) as response:
            assert [each["text"] for each in (await response.json())["choices"]] == [single["text"]] * len(PROMPTS)
        async with http.post("/v1/completions", data=sent({"prompt": one, "max_tokens": 2})) as response:
            assert (await response.json())["usage"]["prompt_tokens"] == len(one)
        async with http.post("/generate", data=sent({"input_ids": one, "sampling_params": params})) as response:
            assert (await response.json())["meta_info"]["prompt_tokens"] == len(one)
    async with make_gateway(fleet, dialect="vllm") as (_, http):
        body = {"token_ids": one, "sampling_params": {"max_tokens": 2}, "return_token_ids": True}
        async with http.post("/inference/v1/generate", data=sent(body)) as response:
            assert (await response.json())["prompt_token_ids"] == one
    body = {"input_ids": one, "sampling_params": params}
    async with make_gateway(fleet, dialect="omni") as (_, http), http.post("/generate", data=sent(body)) as response:
        assert (await response.json())["meta_info"]["prompt_tokens"] == len(one)


WRONG: dict[str, tuple[Any, int, str]] = {
    "more prompts than samples may be": ({"input_ids": [[1, 2]] * 400_000}, 400, "input_ids"),
    "a text among token ids": ({"input_ids": [*ids(400_000), "x"]}, 400, "input_ids"),
    "a negative token id": ({"input_ids": [*ids(400_000), -1]}, 400, "input_ids"),
    "two kinds of prompts": ({"text": "x", "input_ids": ids(400_000)}, 400, "input_ids"),
    "a text beyond a message": ({"text": "ä" * (9 << 20)}, 413, "text"),
    "many objects": ({"text": "x", "other": [[]] * (1 << 20)}, 413, "body"),
    "many numbers": ({"text": "x", "other": [1.5] * (1 << 20)}, 413, "body"),
    "no object": ([[]] * (1 << 20), 413, "body"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_large_body_that_is_wrong_is_refused_by_field(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], wrong: str
) -> None:
    body, status, field = WRONG[wrong]
    async with make_gateway(fleet) as (server, http):
        async with http.post("/generate", data=sent(body)) as response:
            assert (response.status, (await response.json())["error"]["field"]) == (status, field)
        await eventually(lambda: server.bodies.room.used == 0)


async def test_a_large_body_that_is_no_json_is_refused(http: aiohttp.ClientSession) -> None:
    async with http.post("/generate", data=io.BytesIO(b'{"text": "' + b"x" * http_bodies.HUGE)) as response:
        said = (await response.json())["error"]
    assert (response.status, said["reason"], said["field"]) == (400, "FIELD_INVALID", "body")


async def test_large_bodies_have_a_bound_together(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_bodies, "WAIT_S", 0.3)
    size = http_bodies.LARGE
    begun, release = asyncio.Event(), asyncio.Event()
    large = json.dumps({"text": "x", "other": "x" * size, "sampling_params": {"max_new_tokens": 1}}).encode()

    async def slowly() -> Any:
        yield large[:-1]
        begun.set()
        await release.wait()
        yield large[-1:]

    async with make_gateway(fleet) as (server, http):
        server.bodies.room = http_bodies.Room(len(large) + size)
        slow = asyncio.create_task(http.post("/generate", data=slowly(), headers={"Content-Length": str(len(large))}))
        await begun.wait()
        await eventually(lambda: server.bodies.room.used == len(large))
        for path in ("/generate", "/v1/completions", "/pause_generation"):
            async with http.post(path, data=io.BytesIO(large)) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert (await response.json())["error"]["reason"] == "TOO_MANY_REQUESTS"
        async with http.get("/health") as response:
            assert response.status == 200
        async with http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}}) as response:
            assert response.status == 200
        monkeypatch.setattr(http_bodies, "WAIT_S", 30.0)
        waiting = asyncio.create_task(http.post("/generate", data=io.BytesIO(large)))
        release.set()
        for post in (slow, waiting):
            assert (await post).status == 200
        await eventually(lambda: server.bodies.room.used == 0)


async def test_a_body_whose_length_is_not_declared_takes_room_for_the_longest(
    fleet: InProcessFleet, make_gateway: Callable[..., Any]
) -> None:
    release = asyncio.Event()

    async def slowly() -> Any:
        yield b" " * http_bodies.LARGE
        await release.wait()
        yield b'{"text": "x", "sampling_params": {"max_new_tokens": 1}}'

    async with make_gateway(fleet) as (server, http):
        post = asyncio.create_task(http.post("/generate", data=slowly()))
        await eventually(lambda: server.bodies.room.used == server.bodies.most)
        release.set()
        assert (await post).status == 200
        await eventually(lambda: server.bodies.room.used == 0)


async def test_a_large_body_takes_no_room_while_its_samples_are_under_way(
    fleet: InProcessFleet, make_gateway: Callable[..., Any]
) -> None:
    bodies = {
        "/generate": json.dumps({"text": "x", "unheard_of": "x" * http_bodies.HUGE}).encode(),
        "/v1/completions": json.dumps({"prompt": "x", "unheard_of": "x" * http_bodies.HUGE}).encode(),
    }
    async with make_gateway(fleet) as (server, http):
        async with http.post("/pause_generation", json={"mode": "abort"}) as response:
            assert response.status == 200
        for path, body in bodies.items():
            post = asyncio.create_task(http.post(path, data=io.BytesIO(body)))
            await eventually(lambda: server.generation.inflight == 1)
            assert server.bodies.room.used == 0
            assert not [each for each in gc.get_objects() if type(each) is dict and each.get("unheard_of")]
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)
            await eventually(lambda: server.generation.inflight == 0)


async def test_samples_under_way_have_a_bound_together(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MOST_INFLIGHT_BYTES", 3000)
    body = {"text": "x" * 2000, "sampling_params": {"max_new_tokens": 1}}
    async with make_gateway(fleet) as (server, http):
        async with http.post("/pause_generation", json={"mode": "abort"}) as response:
            assert response.status == 200
        first = asyncio.create_task(http.post("/generate", json=body))
        await eventually(lambda: server.generation.inflight == 1)
        async with http.post("/generate", json=body) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert (await response.json())["error"]["reason"] == "TOO_MANY_REQUESTS"
        async with http.post("/continue_generation", json={}) as response:
            assert response.status == 200
        assert (await first).status == 200
        assert server.generation.inflight_bytes == 0


async def test_a_parsing_process_keeps_no_other_request_waiting_and_ends_with_its_caller(
    fleet: InProcessFleet, make_gateway: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def stuck() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(http_bodies, "_start", stuck)
    body = {"text": "x", "other": "x" * http_bodies.HUGE}
    async with make_gateway(fleet) as (server, http):
        posts = [asyncio.create_task(http.post("/generate", data=sent(body))) for _ in range(2)]
        await eventually(lambda: started)
        async with http.get("/health") as response:
            assert response.status == 200
        async with http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}}) as response:
            assert response.status == 200
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        await eventually(lambda: server.bodies.room.used == 0)
        assert all(each.wait(10) for each in started)


async def test_a_process_that_ends_fails_its_request_only(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"text": "x", "other": "x" * http_bodies.HUGE, "sampling_params": {"max_new_tokens": 1}}
    with monkeypatch.context() as patched:
        patched.setattr(
            http_bodies,
            "_start",
            lambda: subprocess.Popen(["false"], stdin=subprocess.PIPE, stdout=subprocess.PIPE),
        )
        async with http.post("/generate", data=sent(body)) as response:
            assert (response.status, (await response.json())["error"]["reason"]) == (500, "INTERNAL")
    async with http.post("/generate", data=sent(body)) as response:
        assert response.status == 200


def test_an_error_without_frames_has_none_of_its_causes() -> None:
    held = []

    def refuse(body: object) -> None:
        try:
            raise KeyError(body)
        except KeyError as cause:
            error = Reason.FIELD_INVALID.error("no", field="body")
            held.append(error)
            raise error from cause

    with pytest.raises(RlctlError) as caught:
        refuse(object())
    error = errors.without_frames(caught.value)
    assert error is held[0]
    assert error.__cause__ is not None
    assert error.__traceback__ is error.__cause__.__traceback__ is None
