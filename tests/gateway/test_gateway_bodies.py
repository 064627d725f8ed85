"""Room for bodies, and documents that a process parses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.runtime import http_bodies, large_json
from rlctl.runtime.http_bodies import HUGE, Bodies, Room
from rlctl.transport.channel import REFUSED_ABOVE_BYTES
from rlctl.v1.rollout_pb2 import TokenIds


async def test_room_is_given_first_come_first_served() -> None:
    room, order = Room(10), []

    async def take(name: str, size: int) -> None:
        await room.take(size)
        order.append(name)

    await take("first", 6)
    large = asyncio.create_task(take("large", 8))
    small = asyncio.create_task(take("small", 1))
    await asyncio.sleep(0)
    assert order == ["first"]
    room.give(6)
    await asyncio.gather(large, small)
    assert order == ["first", "large", "small"]
    assert room.used == 9


async def test_a_body_that_finds_too_many_waiting_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bodies, "MOST_WAITING", 1)
    room = Room(10)
    await room.take(6)
    waiting = asyncio.create_task(room.take(8))
    await asyncio.sleep(0)
    with pytest.raises(RlctlError) as caught:
        await room.take(1)
    assert caught.value.reason is Reason.TOO_MANY_REQUESTS
    room.give(6)
    await waiting
    await room.take(1)
    assert room.used == 9


async def test_a_caller_that_leaves_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bodies, "MOST_WAITING", 2)
    room = Room(10)
    await room.take(6)
    first, second = (asyncio.create_task(room.take(8)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    third = asyncio.create_task(room.take(2))
    await asyncio.sleep(0)
    assert not third.done(), "the first still waits"
    room.give(6)
    await asyncio.gather(first, third)
    assert room.used == 10


async def test_room_that_nobody_waits_for_any_more_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bodies, "WAIT_S", 0.05)
    room = Room(10)
    await room.take(6)
    first, late = (asyncio.create_task(room.take(size)) for size in (8, 9))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(RlctlError) as caught:
        await late
    assert caught.value.reason is Reason.TOO_MANY_REQUESTS
    await room.take(4)
    room.give(10)
    assert room.used == 0


@pytest.mark.parametrize("ended", ["cancelled", "in time"])
async def test_room_that_comes_free_as_its_wait_ends_is_not_lost(ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_bodies, "WAIT_S", 0.0 if ended == "in time" else 30.0)
    room = Room(10)
    await room.take(6)
    waiting = asyncio.create_task(room.take(8))
    await asyncio.sleep(0)
    room.give(6)
    if ended == "cancelled":
        waiting.cancel()
    await asyncio.wait([waiting])
    took = not waiting.cancelled() and waiting.exception() is None
    assert room.used == (8 if took else 0)


@pytest.mark.parametrize(
    "value",
    [
        {"text": "a" * HUGE, "n": 1, "f": 0.1, "nothing": None, "yes": True, "deep": [[{"a": [1]}]]},
        {"text": ["ä\u2028\U0001f600" * 9, "b" * HUGE], "big": (1 << 64) - 1, "negative": -1},
        ["a" * HUGE, 1],
        "a" * HUGE,
    ],
    ids=["object", "texts", "list", "text"],
)
async def test_a_huge_document_is_read_as_any_other(value: Any) -> None:
    document = json.dumps(value).encode()
    assert await Bodies(1 << 30).parse(document) == http_bodies.parsed(document) == value


@pytest.mark.parametrize("name", ["input_ids", "input_tokens", "prompt", "token_ids", "tokens"])
async def test_token_ids_of_a_huge_document_come_as_messages(name: str) -> None:
    ids = list(range(400_000))
    bodies = Bodies(1 << 30)
    assert await bodies.parse(json.dumps({name: ids}).encode()) == {name: TokenIds(ids=ids)}
    mixed = [ids, [], ["x"], [1 << 40], "x", 5]
    assert await bodies.parse(json.dumps({name: mixed}).encode()) == {name: [TokenIds(ids=ids), *mixed[1:]]}


@pytest.mark.parametrize("depth", [900, 5000])
def test_a_deep_document_is_read_or_refused(depth: int) -> None:
    document = b"[" * depth + b"]" * depth
    for body in (document, b'{"input_ids": ' + document + b"}"):
        kind, _, field = large_json.answer(body)
        assert (kind, field) == ((large_json.PARSED, "") if depth < 1000 else (large_json.INVALID, "body"))


def test_prompts_have_the_bound_of_messages() -> None:
    assert large_json.MOST_PROMPT_BYTES == REFUSED_ABOVE_BYTES
