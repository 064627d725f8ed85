"""Many calls at once at a server of rlctl's."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2, health_pb2_grpc

from rlctl.transport.channel import open_channel
from rlctl.transport.server import GrpcServer

CALLS = 3000


async def test_none_of_many_calls_at_once_is_cancelled() -> None:
    """A trainer with generated stubs asks for a batch, or a whole fleet comes back to its coordinator."""
    server = GrpcServer([], token=None)
    address = await server.start("127.0.0.1:0")
    try:
        async with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            calls = (stub.Check(health_pb2.HealthCheckRequest()) for _ in range(CALLS))
            answers = await asyncio.gather(*calls)
    finally:
        await server.stop(0)
    assert [answer.status for answer in answers] == [health_pb2.HealthCheckResponse.SERVING] * CALLS
