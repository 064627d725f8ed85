"""The two halves of a request to a pair, whatever a router or a caller of its own sends as them. Without either."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.gateway.backend.service import Settings
from rlctl.gateway.http.dialect import Reply
from rlctl.gateway.http.placeholders import PREFILL
from rlctl.gateway.router import split_pairs
from rlctl.gateway.router.split_pairs import Halves

WITHIN_S = 5.0


class _Generation:
    settings = Settings()


class _Call:
    """What halves look at of one."""

    generation = _Generation()

    def __init__(self, room: Any, **path: str) -> None:
        self.path = path
        self._body: Any = {"text": "x", "bootstrap_host": "h", "bootstrap_room": room}

    async def json(self) -> Any:
        return self._body

    def forget(self) -> None:
        self._body = None

    def replace_json(self, value: Any) -> None:
        self._body = value


async def generates(call: Any) -> Reply:
    return Reply([call.path.get(PREFILL), await call.json()])


async def prompt(both: Halves, room: Any, slot: str = "p0") -> Reply:
    call: Any = _Call(room, **{PREFILL: slot})
    return await both.prompt(call)


async def whole(both: Halves, room: Any, handler: Any = generates) -> Any:
    call: Any = _Call(room)
    return (await both.whole(handler)(call)).body


@pytest.mark.parametrize("first", ["prompt", "whole"])
async def test_nothing_is_kept_of_a_request_that_both_halves_have_come_of(first: str) -> None:
    both = Halves()
    for room in range(100):
        halves_of = {"prompt": prompt(both, room), "whole": whole(both, room)}
        came = [asyncio.ensure_future(halves_of.pop(first))]
        await asyncio.sleep(0)
        came += [asyncio.ensure_future(other) for other in halves_of.values()]
        async with asyncio.timeout(WITHIN_S):
            answers = await asyncio.gather(*came)
        assert ["p0", {"text": "x"}] in answers
    assert not both._requests


async def test_halves_beyond_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_pairs, "MOST", 1)
    both = Halves()
    first = asyncio.ensure_future(prompt(both, 1))
    await asyncio.sleep(0)
    for half in (prompt, whole):
        with pytest.raises(RlctlError) as caught:
            await half(both, 2)
        assert caught.value.reason is Reason.TOO_MANY_REQUESTS
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(first, whole(both, 1))
        await asyncio.gather(prompt(both, 2), whole(both, 2))


async def test_a_prompt_whose_other_half_never_comes_is_not_kept_for_as_long_as_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_pairs, "KEPT_S", 2.0)
    both = Halves()
    waiting = [asyncio.ensure_future(prompt(both, room)) for room in range(1000)]
    left = asyncio.ensure_future(prompt(both, -1))
    await asyncio.sleep(0.05)
    left.cancel()
    assert len(both._requests) == 1001
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*waiting)
    assert not both._requests


async def test_a_prompt_waits_for_a_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_pairs, "KEPT_S", 0.05)
    both = Halves()

    async def long(call: Any) -> Reply:
        await asyncio.sleep(0.3)
        return await generates(call)

    generating = asyncio.ensure_future(whole(both, 7, long))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(prompt(both, 7))
    await asyncio.sleep(0.15)
    assert not waiting.done()
    await asyncio.gather(generating, waiting)


async def test_a_decode_half_that_is_ended_ends_its_prompt() -> None:
    both = Halves()

    began = asyncio.Event()

    async def forever(_: Any) -> Reply:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    waiting = asyncio.ensure_future(prompt(both, 7))
    generating = asyncio.ensure_future(whole(both, 7, forever))
    await began.wait()
    generating.cancel()
    async with asyncio.timeout(WITHIN_S):
        await waiting


@pytest.mark.parametrize("room", ["x", "1", 1.5, 1e300, [], [[1]], ["1"], [1.0], {}, None])
async def test_what_is_no_room_is_no_half(room: Any) -> None:
    both = Halves()
    async with asyncio.timeout(WITHIN_S):
        assert await prompt(both, room) == Reply({})
        assert (await whole(both, room))[1]["bootstrap_room"] == room, "who generates says what is wrong with it"
    assert not both._requests
