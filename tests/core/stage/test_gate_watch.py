"""Requests under way at a stage: whom a look at the gate wakes, and when a wait is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from types import MappingProxyType

import pytest
from serving_states import READY

from rlctl.contract.errors import Reason, RlctlError
from rlctl.ports import SystemClock
from rlctl.stage.generation import gate_watch
from rlctl.stage.generation.gate_watch import Ongoing
from rlctl.stage.serving_state import Serving
from rlctl.v1 import common_pb2

SOON_S = 0.01


class Host:
    """A stage whose state is set by the test."""

    def __init__(self) -> None:
        self.serving = READY
        self.clock = SystemClock()
        self.ongoing = Ongoing(lambda: self.serving, self.clock)

    def wait(
        self, coming: Awaitable[str], *, left: float = float("inf"), adapter: str = ""
    ) -> asyncio.Task[str | None]:
        """A request that waits for what its engine says."""
        return asyncio.ensure_future(self._next(coming, self.clock.now() + left, adapter))

    async def _next(self, coming: Awaitable[str], deadline: float, adapter: str) -> str | None:
        async def said() -> AsyncGenerator[str, None]:
            yield await coming

        async with aclosing(said()) as parts:
            request = self.ongoing.begin(deadline, adapter)
            try:
                part = await request.next(parts)
                assert part is None or await request.next(parts) is None
                return part
            except RlctlError:
                task = asyncio.current_task()
                assert task is not None
                assert not task.cancelling()
                raise
            finally:
                self.ongoing.end(request)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """One that is looked at often."""
    monkeypatch.setattr(gate_watch, "LOOK_S", SOON_S)
    return Host()


def new() -> asyncio.Future[str]:
    """What an engine has yet to say."""
    return asyncio.get_running_loop().create_future()


async def reason(waiting: asyncio.Task[str | None]) -> Reason:
    """Why a wait ended."""
    with pytest.raises(RlctlError) as refused:
        await waiting
    return refused.value.reason


async def test_what_the_engine_says_ends_its_own_wait_only(host: Host) -> None:
    first, second = new(), new()
    one, other = host.wait(first), host.wait(second)
    await asyncio.sleep(3 * SOON_S)
    assert not one.done()
    first.set_result("x")
    assert await one == "x"
    assert not other.done()
    second.set_result("y")
    assert await other == "y"


async def test_what_was_said_before_the_gate_shut_is_not_told_after(host: Host) -> None:
    coming = new()
    coming.set_result("x")
    host.serving = READY._replace(lease_until=0.0)
    assert await reason(host.wait(coming)) is Reason.STAGE_NOT_SERVING


async def test_a_gate_that_shuts_ends_every_silent_wait(host: Host) -> None:
    waits = [host.wait(new()) for _ in range(3)]
    await asyncio.sleep(2 * SOON_S)
    host.serving = READY._replace(state=common_pb2.STAGE_STATE_DIRTY)
    assert {await reason(each) for each in waits} == {Reason.STAGE_NOT_SERVING}


async def test_what_nobody_vouches_for_is_not_told_in_any_state(host: Host) -> None:
    """A stage that a version has left out, or that was written by halves, takes part in the next update, or sleeps."""
    for state in (common_pb2.STAGE_STATE_UPDATING, common_pb2.STAGE_STATE_ASLEEP, common_pb2.STAGE_STATE_PAUSED):
        host.serving = READY._replace(state=state)
        coming = new()
        coming.set_result("x")
        await host.wait(coming)
        host.serving = host.serving._replace(vouched=False)
        assert await reason(host.wait(coming)) is Reason.STAGE_NOT_SERVING


async def test_an_adapter_that_is_gone_ends_its_own_requests_only(host: Host) -> None:
    said = new()
    base, adapted = host.wait(said), host.wait(new(), adapter="math")
    await asyncio.sleep(0)
    host.serving = READY._replace(adapters=MappingProxyType({}))
    assert await reason(adapted) is Reason.STAGE_NOT_SERVING
    assert not base.done()
    said.set_result("x")
    await base


async def test_time_is_up_between_two_looks(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_watch, "LOOK_S", 3600.0)
    assert await reason(host.wait(new(), left=SOON_S)) is Reason.DEADLINE_EXCEEDED
    assert await reason(host.wait(new(), left=0.0)) is Reason.DEADLINE_EXCEEDED


async def test_one_look_serves_all_who_wait_and_wakes_nobody_in_vain(host: Host) -> None:
    asked = 0

    def counted() -> Serving:
        nonlocal asked
        asked += 1
        return READY

    host.ongoing = Ongoing(counted, host.clock)
    said = [new() for _ in range(20)]
    started = host.clock.now()
    waits = [host.wait(each, left=3600.0) for each in said]
    await asyncio.sleep(5 * SOON_S)
    assert 0 < asked <= (host.clock.now() - started) / SOON_S
    for each in said:
        each.set_result("x")
    await asyncio.gather(*waits)


async def test_nobody_looks_when_nobody_waits(host: Host) -> None:
    looked = 0

    def counted() -> Serving:
        nonlocal looked
        looked += 1
        return READY

    host.ongoing = Ongoing(counted, host.clock)
    coming = new()
    waiting = host.wait(coming)
    await asyncio.sleep(3 * SOON_S)
    coming.set_result("x")
    await waiting
    await asyncio.sleep(2 * SOON_S)
    after = looked
    await asyncio.sleep(5 * SOON_S)
    assert looked == after > 1


async def test_an_engine_that_speaks_although_it_was_cancelled_is_not_told(host: Host) -> None:
    async def stubborn() -> str:
        with suppress(asyncio.CancelledError):
            await new()
        return "x"

    assert await reason(host.wait(stubborn(), left=SOON_S)) is Reason.DEADLINE_EXCEEDED


async def test_an_engine_that_fails_as_it_is_cancelled_is_not_to_blame(host: Host) -> None:
    async def failing() -> str:
        try:
            return await new()
        finally:
            raise Reason.ENGINE_FAILED.error("no such request")

    assert await reason(host.wait(failing(), left=SOON_S)) is Reason.DEADLINE_EXCEEDED


async def test_an_engine_that_gives_up_does_not_look_like_a_caller_who_left(host: Host) -> None:
    coming = new()
    waiting = host.wait(coming)
    await asyncio.sleep(0)
    coming.cancel()
    assert await reason(waiting) is Reason.ENGINE_FAILED


async def test_a_caller_who_leaves_has_left_whatever_else_ends_the_wait(host: Host) -> None:
    host.serving = READY._replace(lease_until=0.0)

    async def slow_to_end() -> str:
        try:
            return await new()
        except asyncio.CancelledError:
            await asyncio.sleep(5 * SOON_S)
            raise

    for coming in (new(), slow_to_end()):
        waiting = host.wait(coming)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()


async def test_a_caller_may_leave_while_the_engine_is_being_ended(host: Host) -> None:
    ending = asyncio.Event()

    async def slow_to_end() -> str:
        try:
            return await new()
        except asyncio.CancelledError:
            ending.set()
            await new()
            raise

    waiting = host.wait(slow_to_end(), left=SOON_S)
    await ending.wait()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()


async def test_a_request_that_its_caller_ends_is_not_interrupted_as_it_ends(host: Host) -> None:
    """The time of a request is up for its caller and at the stage at the same moment."""
    ended = False

    async def slow_to_end() -> str:
        nonlocal ended
        try:
            return await new()
        finally:
            await asyncio.sleep(3 * SOON_S)
            ended = True

    waiting = host.wait(slow_to_end(), left=2 * SOON_S)
    await asyncio.sleep(SOON_S)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert ended


async def test_time_that_is_up_while_the_engine_ends_a_wait_of_its_own_is_up_at_the_next_look(host: Host) -> None:
    async def ends_a_wait() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # as asyncio.wait_for does from Python 3.12 on
        time.sleep(2 * SOON_S)  # noqa: ASYNC251 - the loop is busy
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the timer of the request comes now
        task.uncancel()
        return await new()

    async with asyncio.timeout(5):
        assert await reason(host.wait(ends_a_wait(), left=SOON_S)) is Reason.DEADLINE_EXCEEDED


async def test_time_that_is_up_while_the_caller_takes_its_time_ends_the_next_wait(host: Host) -> None:
    async def said() -> AsyncGenerator[str, None]:
        yield "x"
        yield "y"

    async with aclosing(said()) as parts:
        request = host.ongoing.begin(host.clock.now() + 3 * SOON_S, "")
        assert await request.next(parts) == "x"
        await asyncio.sleep(5 * SOON_S)
        with pytest.raises(RlctlError) as late:
            await request.next(parts)
        host.ongoing.end(request)
    assert late.value.reason is Reason.DEADLINE_EXCEEDED


async def test_a_gate_that_was_shut_for_a_moment_while_nobody_waited_ends_nothing(host: Host) -> None:
    async def said() -> AsyncGenerator[str, None]:
        yield "x"
        yield "y"

    async with aclosing(said()) as parts:
        request = host.ongoing.begin(float("inf"), "")
        assert await request.next(parts) == "x"
        host.serving = READY._replace(lease_until=0.0)
        await asyncio.sleep(3 * SOON_S)
        host.serving = READY
        assert await request.next(parts) == "y"
        host.ongoing.end(request)
