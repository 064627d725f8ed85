"""An OpenTelemetry collector in a test's loop, for spans over OTLP/gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from rlctl.traces import tracing
from rlctl.transport import grpc

SERVICES = ("rlctl-trainer", "rlctl-coordinator", "rlctl-gateway")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BAD = ("00-" + "0" * 32 + "-b7ad6b7169203331-01", "ff" + PARENT[2:], PARENT + "-more", PARENT.upper(), "none", "")


def attributes(span: Span) -> Mapping[str, Any]:
    """Return the attributes of a span, by name."""
    return {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Attributes: ``spans`` has the spans by their service."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {service: [] for service in SERVICES}

    async def Export(self, request: Any, context: object) -> Any:
        for each in request.resource_spans:
            service = next(pair.value.string_value for pair in each.resource.attributes if pair.key == "service.name")
            self.spans[service] += [span for scope in each.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def flush(self) -> None:
        for service in SERVICES:
            assert await asyncio.to_thread(tracing.own_provider(service).force_flush)


@asynccontextmanager
async def collecting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """Let new trainers, coordinators and gateways send their spans to the collector."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tracing.own_provider.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        yield collector
        for service in SERVICES:
            await asyncio.to_thread(tracing.own_provider(service).shutdown)
    tracing.own_provider.cache_clear()
    await server.stop(None)
