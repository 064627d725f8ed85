"""The peers of an admin verb to many stages: bare gRPC streams, and an HTTP POST to each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import grpc.aio

from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.launch.local.child_processes import Process, stop_all
from rlctl.ports import Put
from rlctl.runtime.event_loops import LoopThread
from rlctl.transport import POLLED
from tools.benchmark.fanout import echoes
from tools.benchmark.null_fleet import STAGES_PER_PROCESS, START_S

_POST_S = 60.0


class Peers:
    """``with Peers(directory, count, message) as peers``: ``count`` echoing peers, connected by stream and HTTP.

    The peers are spread over as many processes as the stages, and called from a single event loop of this process.
    """

    def __init__(self, directory: Path, count: int, message: bytes) -> None:
        """``message``: sent to every peer and echoed."""
        if POLLED:
            raise AssertionError("the streams would not be those of gRPC by itself")
        self._directory = directory
        self._count = count
        self._message = message
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        for first in range(0, self._count, STAGES_PER_PROCESS):
            count = min(STAGES_PER_PROCESS, self._count - first)
            log = self._directory / f"echoes-{first}.log"
            self._processes.append(Process(f"echoes-{first}", ["--count", str(count)], log, {}, echoes.__name__))
        try:
            facts = [process.announced(START_S) for process in self._processes]
        except BaseException:
            stop_all(self._processes)
            raise
        self._journal = SqliteJournal(self._directory / "replies.db")
        self._loop = LoopThread("peers")
        self._loop.call(self._connect(_ports(facts, "grpc")))
        self._urls = [f"http://127.0.0.1:{port}{echoes.PATH}" for port in _ports(facts, "http")]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call(self._disconnect())
        self._loop.stop()
        self._journal.close()
        stop_all(self._processes)

    def streams(self) -> float:
        """Send a message over every open stream and back; return seconds."""
        return self._loop.call(self._over_streams())

    def posts(self) -> float:
        """Send a POST to each peer, then write all replies to a journal; return seconds."""
        return self._loop.call(self._by_http())

    async def _connect(self, ports: Sequence[str]) -> None:
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in ports]
        self._calls: list[Any] = [channel.stream_stream(echoes.METHOD)() for channel in self._channels]
        await asyncio.gather(*(call.wait_for_connection() for call in self._calls))
        timeout = aiohttp.ClientTimeout(total=_POST_S)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def _disconnect(self) -> None:
        await self._session.close()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def _over_streams(self) -> float:
        async def one(call: Any) -> None:
            await call.write(self._message)
            if await call.read() != self._message:
                raise AssertionError("the echo differs")

        started = time.perf_counter()
        await asyncio.gather(*(one(call) for call in self._calls))
        return time.perf_counter() - started

    async def _by_http(self) -> float:
        async def one(url: str) -> Put:
            async with self._session.post(url, data=self._message) as response:
                response.raise_for_status()
                return Put("reply", url, await response.read())

        started = time.perf_counter()
        await self._journal.write(await asyncio.gather(*(one(url) for url in self._urls)))
        return time.perf_counter() - started


def _ports(facts: Sequence[dict[str, str]], kind: str) -> list[str]:
    return [port for each in facts for port in each[kind].split(",")]
