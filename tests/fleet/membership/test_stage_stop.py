"""The stop of a stage server: in order, and within the time that launchers wait."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from waiting import eventually

from rlctl.stage import server
from rlctl.testing.fake_engine import FakeEngine
from rlctl.transport.channel import open_channel
from rlctl.v1 import rollout_pb2 as r
from rlctl.v1.rollout_pb2_grpc import RolloutServiceStub


async def read_to_end(parts: Any) -> None:
    while await parts.read() is not grpc.aio.EOF:
        pass


async def test_the_parts_of_a_stop_share_one_deadline(
    make_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not answer, a request does not end, and the engine does not stop."""
    stopping: list[float] = []

    async def never(engine: FakeEngine) -> None:
        stopping.append(time.monotonic())
        await asyncio.Event().wait()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with make_fleet(a=1) as fleet:
        stage = fleet.stages["a"]
        async with open_channel(stage.rollout_address) as channel:
            request = r.GenerateRequest(text="endless")
            request.sampling_params.max_new_tokens = 10**6
            parts = RolloutServiceStub(channel).GenerateStream(request)
            assert await parts.read()
            listener = await asyncio.start_server(silent, "127.0.0.1", 0)
            host, port = listener.sockets[0].getsockname()
            stage.config = dataclasses.replace(stage.config, coordinator=f"{host}:{port}")
            monkeypatch.setattr(FakeEngine, "stop", never)
            monkeypatch.setattr(server, "DEREGISTER_S", 0.5)
            monkeypatch.setattr(server, "STOP_S", 3.0)
            monkeypatch.setattr(server, "ENGINE_STOPS_S", 1.5)
            started = time.monotonic()
            await asyncio.wait_for(fleet.stages.pop("a").stop(), 20.0)
            ended = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError):
                await read_to_end(parts)
        listener.close()
        assert stopping[0] - started < 3.0 - 0.5, "the engine had its part of the time"
        assert ended - started < 3.0 + 1.0
        await eventually(lambda: not fleet.server.coordinator.roster.slots["a"].linked)
