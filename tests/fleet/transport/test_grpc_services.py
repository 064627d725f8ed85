"""gRPC's own services beside rlctl's: their requests are read and refused as those of rlctl."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from rlctl.contract.errors import Reason
from rlctl.testing.in_process_fleet import InProcessFleet
from rlctl.transport.status import from_grpc

MALFORMED = b"\xff\xff"


async def _refusal(call: Any) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call if hasattr(call, "__await__") else anext(aiter(call)))
    return from_grpc(refused.value).reason


async def test_malformed_requests_are_refused_with_a_reason(
    fleet: InProcessFleet, caplog: pytest.LogCaptureFixture
) -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield MALFORMED

    health, reflection = "/grpc.health.v1.Health", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    for method in ("Check", "List"):
        refusal = await _refusal(fleet.channel.unary_unary(f"{health}/{method}")(MALFORMED))
        assert refusal is Reason.FIELD_INVALID
    assert await _refusal(fleet.channel.unary_stream(f"{health}/Watch")(MALFORMED)) is Reason.FIELD_INVALID
    assert await _refusal(fleet.channel.stream_stream(reflection)(requests())) is Reason.FIELD_INVALID
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_method_that_grpc_has_not_written_is_unknown(
    fleet: InProcessFleet, caplog: pytest.LogCaptureFixture
) -> None:
    assert await _refusal(fleet.channel.unary_unary("/grpc.health.v1.Health/List")(b"")) is Reason.VERB_UNKNOWN
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
