"""Requests that wait for the gate of a data port."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from serving_states import READY

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import SystemClock
from rlctl.stage.data_port.admission import Admission
from rlctl.stage.serving_state import Serving
from rlctl.v1 import common_pb2

PAUSED = READY._replace(state=common_pb2.STAGE_STATE_PAUSED)


class Host:
    """A stage with a state set by the test."""

    def __init__(self) -> None:
        self.serving = PAUSED
        self.looks = 0
        self._admission = Admission(self._look, SystemClock())

    def _look(self) -> Serving:
        self.looks += 1
        return self.serving

    async def waiting(self, wait_s: float, adapter: str = "") -> asyncio.Task[Serving]:
        """Return a request that waits for the gate."""
        admitting = self._admission.admit(wait_s, model="", min_version_seq=0, adapter=adapter)
        request = asyncio.create_task(admitting)
        await asyncio.sleep(0)
        return request


@asynccontextmanager
async def heartbeat() -> AsyncIterator[Callable[[], float]]:
    """Beat every 10 ms. The yielded function returns the longest time between two beats, in seconds."""
    beats = [time.monotonic()]

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.01)
            beats.append(time.monotonic())

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    yield lambda: max(later - earlier for earlier, later in itertools.pairwise(beats))
    beating.cancel()


async def refusal_of(request: asyncio.Task[Serving]) -> Reason:
    with pytest.raises(RlctlError) as refused:
        await request
    return refused.value.reason


async def test_the_loop_goes_on_while_requests_wait_at_different_states() -> None:
    """Each grant of a serving lease changes the state of a paused stage."""
    host = Host()
    first = await host.waiting(5)
    async with heartbeat() as longest:
        host.serving = PAUSED._replace(lease_until=2e9)
        second = await host.waiting(2)
        assert await refusal_of(second) is Reason.STAGE_NOT_SERVING
        await asyncio.sleep(0.02)
        assert longest() < 1.5
    host.serving = READY
    assert await first == READY


async def test_a_request_at_a_newer_state_reads_the_state_as_rarely_as_others() -> None:
    host = Host()
    waiting = [await host.waiting(5)]
    for lease_until in range(2, 22):
        host.serving = PAUSED._replace(lease_until=lease_until * 1e9)
        waiting.append(await host.waiting(5))
    await asyncio.sleep(0.5)
    assert host.looks < 300
    host.serving = READY
    assert await asyncio.wait_for(asyncio.gather(*waiting), 2) == [READY] * 21


async def test_a_state_that_changes_and_returns_before_the_poll_admits_a_request() -> None:
    """The first request waits at the old state; the second one is refused only at the state in between."""
    host = Host()
    host.serving = only_math_paused = READY._replace(paused_adapters=frozenset({"math"}))
    first = await host.waiting(5, adapter="math")
    host.serving = PAUSED
    second = await host.waiting(5)
    host.serving = only_math_paused
    assert await asyncio.wait_for(second, 1) == only_math_paused
    assert not first.done()
    host.serving = READY
    assert await asyncio.wait_for(first, 1) == READY
