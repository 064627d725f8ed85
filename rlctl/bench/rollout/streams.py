"""The caller of many streams, as a process: ``python -m rlctl.bench.rollout.streams COORDINATOR COUNT``."""

from __future__ import annotations

import argparse
import asyncio

from rlctl import loops
from rlctl.client import aio
from rlctl.client.generation import build_request
from rlctl.process import announce, end_with_parent, stop_event
from rlctl.rollout.progress import Progress, begin
from rlctl.v1.rollout_pb2 import Sample


async def _ask(coordinator: str, count: int) -> None:
    """Open so many streams and keep them open."""
    end_with_parent()
    stop = stop_event()
    async with await aio.connect(coordinator) as fleet:
        begun = 0
        every = asyncio.Event()

        rollout = fleet.rollout("actor")
        request = build_request("x", {"max_new_tokens": 1_000_000}, model="actor")

        async def stream() -> None:
            started: set[bool] = set()

            def told(_progress: Progress, _part: Sample) -> None:
                nonlocal begun
                begun += not started
                started.add(True)
                if begun == count:
                    every.set()

            await rollout.complete(begin(request), timeout_s=3600.0, told=told)

        tasks = [asyncio.create_task(stream()) for _ in range(count)]
        begun_or_stopped = [asyncio.create_task(event.wait()) for event in (every, stop)]
        await asyncio.wait(begun_or_stopped, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            announce("streams", address=coordinator)
            await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("count", type=int)
    given = parser.parse_args()
    loops.run(_ask(given.coordinator, given.count))
