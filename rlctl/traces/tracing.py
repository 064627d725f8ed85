"""The tracer of a process, configured by the variables of OpenTelemetry."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from rlctl.traces.context import TRACEPARENT
from rlctl.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def tracer(service: str) -> Tracer | None:
    """Return the tracer of a process with this service name; None if the process makes no traces.

    A program that has configured OpenTelemetry itself keeps this configuration.
    """
    loaded = "opentelemetry.trace" in sys.modules
    if not loaded and not _configured(os.environ):
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        _warn("opentelemetry-sdk is not installed here; pip install 'rlctl[otel]'")
        return None
    provider: trace.TracerProvider | None = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # the program has configured no provider
        provider = own_provider(service) if _configured(os.environ) else None
    return None if provider is None else provider.get_tracer("rlctl", __version__)


def _configured(environment: Mapping[str, str]) -> bool:
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not disabled and environment.get(EXPORTER, "").strip() not in ("", "none")


@functools.cache
def own_provider(service: str) -> TracerProvider | None:
    """Return rlctl's own provider, used by no other library. The exit of the process exports the remaining spans."""
    try:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _warn("opentelemetry-sdk is not installed here; pip install 'rlctl[otel]'")
        return None
    try:
        resource = Resource.create()
    except Exception as error:  # noqa: BLE001 - a setting that it refuses
        _warn(f"a resource detector failed: {error!r}")
        resource = Resource({SERVICE_NAME: service})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    provider = TracerProvider(resource=resource)
    for name in os.environ[EXPORTER].split(","):
        installed = entry_points(group="opentelemetry_traces_exporter", name=_of_protocol(name.strip()))
        if not installed:
            _warn(f"{name.strip()!r} is not installed here")
        for each in installed:
            try:
                provider.add_span_processor(BatchSpanProcessor(each.load()()))
            except Exception as error:  # noqa: BLE001 - traces are never the reason why an update fails
                _warn(f"{name.strip()!r} refuses its settings, see the OTEL_ variables: {error!r}")
    return provider


def _of_protocol(name: str) -> str:
    """Return the entry point of an exporter; for ``otlp`` the exporter of the protocol, gRPC by default."""
    if name != "otlp":
        return name
    protocol = next((os.environ[each] for each in _PROTOCOLS if os.environ.get(each)), "grpc")
    return "otlp_proto_http" if protocol.startswith("http") else "otlp_proto_grpc"


@functools.cache
def _warn(why: str) -> None:
    log.warning("no traces by %s: %s", EXPORTER, why)


def parent(traceparent: str) -> Context:
    """Return a context with this parent span; "": without a parent."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent} if traceparent else {})


def fail(span: Span, reason: str) -> None:
    """Mark a span as failed, with the reason of an error."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, reason))
