"""The caller of many streams: ``python -m tools.benchmark.rollout.streams COORDINATOR COUNT [--apart]``."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle

from rlctl.rollout.continuation import begin
from rlctl.rollout.requests import build_request
from rlctl.runtime import event_loops
from rlctl.runtime.server_process import announce, end_with_parent, stop_event
from rlctl.sdk import aio
from rlctl.transport import grpc
from rlctl.transport.channel import open_channel
from rlctl.v1.fleet_pb2 import Stage
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub

REQUEST = build_request("x", {"max_new_tokens": 1_000_000}, model="actor")
_Open = Callable[[Callable[[], None]], Awaitable[object]]
"""Opens a stream and keeps it open; calls back at every message."""


async def _ask(coordinator: str, count: int, *, apart: bool) -> None:
    """Open ``count`` streams and keep them open."""
    end_with_parent()
    stop = stop_event()
    async with await aio.connect(coordinator) as fleet, _calls(await fleet.stages()) as calls:
        rollout = fleet.rollout("actor")
        begun = 0
        every = asyncio.Event()

        async def by_sdk(told: Callable[[], None]) -> None:
            await rollout.complete(begin(REQUEST), timeout_s=3600.0, told=lambda *_: told())

        async def stream(open_one: _Open) -> None:
            started = False

            def told() -> None:
                nonlocal begun, started
                begun += not started
                started = True
                if begun == count:
                    every.set()

            await open_one(told)

        ways = cycle(calls) if apart else cycle([by_sdk])
        tasks = [asyncio.create_task(stream(next(ways))) for _ in range(count)]
        waits = [asyncio.create_task(event.wait()) for event in (every, stop)]
        await asyncio.wait([*waits, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if every.is_set() and not stop.is_set():
            announce("streams", address=coordinator)
            await asyncio.wait([waits[1], *tasks], return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not stop.is_set():
            raise RuntimeError(f"{len(ended)} of {count} streams have ended") from ended[0].exception()


@asynccontextmanager
async def _calls(stages: Sequence[Stage]) -> AsyncIterator[list[_Open]]:
    """Yield openers of a separate gRPC call for each stream, for each of the stages."""
    async with AsyncExitStack() as stack:

        def to(channel: grpc.aio.Channel) -> _Open:
            stub = RolloutServiceStub(channel)

            async def call(told: Callable[[], None]) -> None:
                async for _ in stub.GenerateStream(REQUEST):
                    told()

            return call

        addresses = [stage.registration.rollout_address for stage in stages]
        yield [to(await stack.enter_async_context(open_channel(address))) for address in addresses]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("count", type=int)
    parser.add_argument("--apart", action="store_true", help="each as a gRPC call of its own, without the SDK")
    given = parser.parse_args()
    event_loops.run(_ask(given.coordinator, given.count, apart=given.apart))
