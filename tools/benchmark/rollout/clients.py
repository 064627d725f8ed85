"""Clients: the SDK, and a bare client of gRPC; each function returns the seconds of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rlctl.runtime.event_loops import LoopThread
from rlctl.sdk import aio
from rlctl.transport.channel import open_channel
from rlctl.v1.rollout_pb2 import GenerateRequest, SamplingParams, TokenIds
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub
from tools.benchmark.figures import Setting
from tools.benchmark.rollout.reply import TOKENS
from tools.benchmark.rollout.ways import PROMPT, SAMPLING

T = TypeVar("T")


def run(setting: Setting, work: Coroutine[Any, Any, T]) -> T:
    """Run a client on one common loop: gRPC remembers closed loops, and logs complaints."""
    return setting.once(_loop).call(work)


def _loop(_setting: Setting) -> LoopThread:
    return LoopThread("clients")


async def sdk(coordinator: str, count: int, at_once: int) -> list[float]:
    """Time samples of the SDK's rollout."""
    async with await aio.connect(coordinator) as fleet:
        rollout = fleet.rollout("actor")

        async def one() -> None:
            await rollout.generate(PROMPT, return_logprob=False, **SAMPLING)  # type: ignore[arg-type]

        return await _timed(one, count, at_once)


async def sdk_streams(coordinator: str, count: int, at_once: int, *, joined: bool = False) -> list[float]:
    """Time streams of the SDK, with a message for every token; ``joined``: a message may have several tokens."""
    async with await aio.connect(coordinator) as fleet:

        async def one() -> None:
            parts = fleet.generate_stream(PROMPT, min_new_tokens=len(TOKENS), **SAMPLING)  # type: ignore[arg-type]
            messages = [len(part.samples[0].output_ids) async for part in parts]
            if sum(messages) != len(TOKENS) or (not joined and len(messages) != len(TOKENS)):
                raise AssertionError(f"tokens of the messages: {messages}")

        return await _timed(one, count, at_once)


async def bare(stage: str, count: int, at_once: int, *, stream: bool) -> list[float]:
    """Time the same request without the SDK."""
    request = GenerateRequest(input_ids=TokenIds(ids=PROMPT), sampling_params=SamplingParams(**SAMPLING))  # type: ignore[arg-type]
    async with open_channel(stage) as channel:
        stub = RolloutServiceStub(channel)

        async def whole() -> None:
            await stub.Generate(request)

        async def streamed() -> None:
            async for _ in stub.GenerateStream(request):
                pass

        return await _timed(streamed if stream else whole, count, at_once)


async def _timed(ask: Callable[[], Awaitable[None]], count: int, at_once: int) -> list[float]:
    await ask()  # opens the connection
    took: list[float] = []
    left = iter(range(count))

    async def run() -> None:
        for _ in left:
            started = time.perf_counter()
            await ask()
            took.append(time.perf_counter() - started)

    await asyncio.gather(*(run() for _ in range(at_once)))
    return took
