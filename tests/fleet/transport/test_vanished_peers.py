"""A peer whose machine is gone says no goodbye: its connection just falls silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from rlctl.engine import EngineConfig
from rlctl.testing.chaos_proxy import ChaosProxy
from rlctl.testing.fake_engine import FakeEngine
from rlctl.transport import server
from rlctl.transport.links import GrpcDialer
from rlctl.v1.control_pb2 import Attach, Attached, ControlRequest
from rlctl.v1.worker_pb2_grpc import WorkerServiceStub
from rlctl.version import CONTRACT_VERSION
from rlctl.worker.server import WorkerConfig, WorkerServer

FASTER = dict.fromkeys(("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"), 300)


@pytest.fixture
async def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[WorkerServer, str]]:
    """A rank that notices a vanished peer within a second, and its address."""
    (tmp_path / "weights.txt").write_text("w")
    faster = tuple((name, FASTER.get(name, value)) for name, value in server.OPTIONS)
    monkeypatch.setattr(server, "OPTIONS", faster)
    rank = WorkerServer(WorkerConfig("fake", EngineConfig(str(tmp_path), rank=1, tp_size=2)))
    yield rank, await rank.start()
    await rank.stop()


@contextlib.asynccontextmanager
async def attached(address: str, setup: Mapping[str, str]) -> AsyncIterator[Attached]:
    link = await GrpcDialer(WorkerServiceStub, None).dial(address)
    link.send(ControlRequest(attach=Attach(contract_version=CONTRACT_VERSION, engine_setup=setup)))
    async for answer in link.receive():
        yield answer.attached
        break
    await link.close()


def setup_of_rank_zero(path: Path) -> Mapping[str, str]:
    return FakeEngine(EngineConfig(str(path), tp_size=2), pytest.fail).setup()


async def test_a_rank_whose_rank_zero_has_vanished_ends(rank: tuple[WorkerServer, str], tmp_path: Path) -> None:
    server, address = rank
    async with ChaosProxy(address) as proxy, attached(proxy.address, setup_of_rank_zero(tmp_path)) as answer:
        assert answer.report.ranks[0].alive
        proxy.blackhole = True
        async with asyncio.timeout(10):
            await server.abandoned.wait()


async def test_a_rank_that_refused_a_setup_waits_for_another_rank_zero_and_ends_with_it(
    rank: tuple[WorkerServer, str], tmp_path: Path
) -> None:
    server, address = rank
    async with attached(address, {"steps": "none"}) as refused:
        assert refused.error.reason == "FIELD_INVALID"
    async with (
        attached(address, {"steps": "none"}) as other,
        ChaosProxy(address) as proxy,
        attached(proxy.address, setup_of_rank_zero(tmp_path)) as answer,
    ):
        assert other.error.reason == "FIELD_INVALID", "its link stays open"
        assert answer.report.ranks[0].alive
        assert not server.abandoned.is_set()
        proxy.blackhole = True
        async with asyncio.timeout(10):
            await server.abandoned.wait()
