"""Large requests: a refused one leaves nothing behind, and one that is read keeps no other request waiting."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from waiting import eventually

from rlctl.contract import errors
from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.generation import sglang
from rlctl.gateway.http import bodies
from rlctl.gateway.http.call import UNKNOWN_FIELDS, Call
from rlctl.rollout.sample import RolloutSample
from rlctl.runtime import http_limits
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
    monkeypatch.setattr(http_limits, "READ_S", 0.1)

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
    parse, begun, release = bodies.parse, threading.Event(), threading.Event()

    def slow(data: bytes) -> Any:
        if len(data) >= http_limits.LARGE:
            begun.set()
            assert release.wait(30)
        return parse(data)

    monkeypatch.setattr(bodies, "parse", slow)
    large = json.dumps({"text": "x", "prompt": "x", "model_path": "/nowhere", "other": "x" * http_limits.LARGE})
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
    assert (response.status, said["reason"], said["field"]) == (413, "MESSAGE_TOO_LARGE", "GenerateRequest")
    assert not begun


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/abort_request"])
async def test_a_body_is_parsed_once(http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    parse, parsed = bodies.parse, []
    monkeypatch.setattr(bodies, "parse", lambda data: parsed.append(data) or parse(data))
    body = {"mode": "abort", "model_path": "/nowhere", "abort_all": True, "unheard_of": 1}
    async with http.post(path, json=body) as response:
        assert len(parsed) == 1
        names = response.headers.get(UNKNOWN_FIELDS, "").split(", ")
    if response.status == 200:
        assert names.count("unheard_of") == 1


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
