"""A peer whose machine is gone says no goodbye: its connection just falls silent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlctl.engine import EngineConfig
from rlctl.testing.chaos_proxy import ChaosProxy
from rlctl.testing.fake_engine import FakeEngine
from rlctl.transport import server
from rlctl.transport.links import GrpcDialer
from rlctl.v1.control_pb2 import Attach, ControlRequest
from rlctl.v1.worker_pb2_grpc import WorkerServiceStub
from rlctl.version import CONTRACT_VERSION
from rlctl.worker.server import WorkerConfig, WorkerServer

FASTER = dict.fromkeys(("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"), 300)


async def test_a_rank_whose_rank_zero_has_vanished_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.txt").write_text("w")
    faster = tuple((name, FASTER.get(name, value)) for name, value in server.OPTIONS)
    monkeypatch.setattr(server, "OPTIONS", faster)
    setup = FakeEngine(EngineConfig(str(tmp_path), tp_size=2), pytest.fail).setup()
    rank = WorkerServer(WorkerConfig("fake", EngineConfig(str(tmp_path), rank=1, tp_size=2)))
    address = await rank.start()
    async with ChaosProxy(address) as proxy:
        link = await GrpcDialer(WorkerServiceStub, None).dial(proxy.address)
        link.send(ControlRequest(attach=Attach(contract_version=CONTRACT_VERSION, engine_setup=setup)))
        async for _ in link.receive():
            break
        proxy.blackhole = True
        async with asyncio.timeout(10):
            await rank.abandoned.wait()
        await link.close()
    await rank.stop()
