"""Spans of samples and forwarded requests, by the GenAI conventions of OpenTelemetry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING
from urllib.parse import unquote

from rlctl.contract.errors import typed
from rlctl.rollout.sample import RolloutSample
from rlctl.runtime.http_forwarding import SEQUENCE, VERSION
from rlctl.traces.context import TRACEPARENT, header_of, received, valid
from rlctl.traces.tracing import fail, parent
from rlctl.v1.fleet_pb2 import Stage

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_operation: ContextVar[str] = ContextVar("operation", default="text_completion")


def enter(path: str, headers: Mapping[str, str]) -> None:
    """Take the trace context of an HTTP request. Calls to the coordinator continue the trace."""
    received.set(valid(headers.get(TRACEPARENT)))
    _operation.set("chat" if path.endswith("/chat/completions") else "text_completion")


@contextlib.contextmanager
def generating(tracer: Tracer | None, model: str) -> Iterator[Span | None]:
    """Make a span around a sample or forwarded request, or None without a tracer."""
    if tracer is None:
        yield None
        return
    from opentelemetry.trace import SpanKind

    name = _operation.get()
    attributes = {"gen_ai.operation.name": name, "gen_ai.provider.name": "rlctl", "gen_ai.request.model": model}
    # Not the current span of the task: a streamed response may end in a different context.
    span = tracer.start_span(f"{name} {model}", parent(received.get()), SpanKind.CLIENT, attributes)
    try:
        yield span
    except BaseException as error:
        fail(span, typed(error).reason.name if isinstance(error, Exception) else "CANCELLED")
        raise
    finally:
        span.end()


def note_sample(span: Span, sample: RolloutSample, stages: Sequence[Stage]) -> None:
    """Add tokens, stage and version of a finished sample."""
    span.set_attribute("gen_ai.usage.input_tokens", len(sample.prompt_ids))
    span.set_attribute("gen_ai.usage.output_tokens", len(sample.whole.output_ids))
    span.set_attribute("gen_ai.response.finish_reasons", [sample.finish])
    if (version := sample.last_version) is not None:
        _note_version(span, version.label, version.sequence)
    slot = sample.parts[-1].slot if sample.parts else ""
    for stage in stages:
        if stage.registration.slot == slot:
            _note_stage(span, slot, stage.registration.rollout_address)
    if sample.error is not None:
        fail(span, sample.error.reason.name)


def note_forwarded(span: Span, stage: Stage, status: int, headers: Mapping[str, str]) -> None:
    """Add stage, version and status of a response that has begun."""
    _note_stage(span, stage.registration.slot, stage.registration.data_address)
    span.set_attribute("http.response.status_code", status)
    if (sequence := headers.get(SEQUENCE, "")).isdecimal():
        _note_version(span, unquote(headers.get(VERSION, "")), int(sequence))
    if status >= 400:
        fail(span, str(status))


def headers(span: Span | None) -> dict[str, str]:
    """Return headers that continue the trace in a forwarded request. Without a span the caller's headers remain."""
    if span is None:
        return {}
    context = span.get_span_context()
    return {TRACEPARENT: header_of(context.trace_id, context.span_id, context.trace_flags)}


def _note_version(span: Span, label: str, sequence: int) -> None:
    span.set_attribute("rlctl.weight_version", label)
    span.set_attribute("rlctl.weight_version_seq", sequence)


def _note_stage(span: Span, slot: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    span.set_attribute("rlctl.slot", slot)
    span.set_attribute("server.address", host.strip("[]"))
    if port.isdecimal():
        span.set_attribute("server.port", int(port))
