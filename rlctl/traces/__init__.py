"""Traces by OpenTelemetry, of trainers, coordinators and gateways; off by default.

Decides when a process makes traces, which exporter takes them, and which traceparent a call carries. The spans are made
where their data is: ``coordinator/traces.py``, ``gateway/backend/generation_spans.py``, ``trainer/traces.py``.

Imports: contract; ``tracing.py`` also opentelemetry, which the extra ``[otel]`` installs, and only in a process whose
OTEL_TRACES_EXPORTER names an exporter or that has loaded opentelemetry itself.

Start with ``context.py`` (``current``: the traceparent for a call) and ``tracing.py`` (``tracer``).
"""
