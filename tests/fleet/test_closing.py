"""A client that is closed while calls of its are under way: whoever waits is told so, in words, and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing

import pytest
from updating import Held

import rlctl
from rlctl.client import aio
from rlctl.errors import Reason, RlctlError
from rlctl.testing.fleet import InProcessFleet
from rlctl.v1.common_pb2 import OUTCOME_UNKNOWN


async def failures(calls: Iterable[asyncio.Future]) -> list[tuple[Reason, int]]:
    ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert [error for error in ended if not isinstance(error, RlctlError)] == []
    return [(error.reason, error.outcome) for error in ended]


async def test_what_is_under_way_may_have_been_done(fleet: InProcessFleet) -> None:
    held = Held(fleet, "flush_cache")
    client = await aio.connect(fleet.server.address)
    watching = asyncio.Event()

    async def watch() -> None:
        async with aclosing(client.watch()) as news:
            async for _ in news:
                watching.set()

    calls = [asyncio.ensure_future(call) for call in (client.flush_cache(), watch())]
    await held.begun.wait()
    await watching.wait()
    await client.close()
    assert await failures(calls) == [(Reason.CANCELLED, OUTCOME_UNKNOWN)] * 2
    held.may_end.set()


async def test_a_call_that_is_cancelled_is_cancelled(fleet: InProcessFleet) -> None:
    held = Held(fleet, "flush_cache")
    async with await aio.connect(fleet.server.address) as client:
        call = asyncio.create_task(client.flush_cache())
        await held.begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    held.may_end.set()


async def test_a_thread_that_waits_is_told(fleet: InProcessFleet) -> None:
    held = Held(fleet, "flush_cache")
    client = await asyncio.to_thread(rlctl.connect, fleet.server.address)
    watching = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch() -> None:
        for _ in client.watch():
            loop.call_soon_threadsafe(watching.set)

    calls = [asyncio.ensure_future(asyncio.to_thread(call)) for call in (client.flush_cache, watch)]
    await held.begun.wait()
    await watching.wait()
    await asyncio.to_thread(client.close)
    assert await failures(calls) == [(Reason.CANCELLED, OUTCOME_UNKNOWN)] * 2
    held.may_end.set()
