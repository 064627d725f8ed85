"""The W3C trace context of calls: the header ``traceparent``. Loads no library."""

from __future__ import annotations

import re
import sys
from contextvars import ContextVar

TRACEPARENT = "traceparent"
"""Name of the HTTP header and of the gRPC metadata."""

VARIABLE = "TRACEPARENT"
"""Environment variable with the trace context of a program; `rlctl` passes the context on."""

_FORMAT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)

received: ContextVar[str] = ContextVar("received", default="")
"""traceparent that the running task passes on with calls. "": no traceparent."""


def valid(header: object) -> str:
    """Return a header in the format of W3C Trace Context; "" otherwise."""
    return header if isinstance(header, str) and _FORMAT.fullmatch(header) else ""


def current() -> str:
    """Return the traceparent for a call of the running task: of the present span, else of the task's caller."""
    api = sys.modules.get("opentelemetry.trace")
    if api is not None:
        span = api.get_current_span().get_span_context()
        if span.is_valid:
            return header_of(span.trace_id, span.span_id, span.trace_flags)
    return received.get()


def header_of(trace_id: int, span_id: int, flags: int) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"
