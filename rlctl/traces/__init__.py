"""OpenTelemetry traces of trainers, coordinators and gateways; off by default.

Decides when a process makes traces, the exporter that receives them, and the traceparent of a call. Spans are made
by the owners of the data: ``coordinator/traces.py``, ``gateway/backend/generation_spans.py``, ``trainer/traces.py``.

Imports: contract; ``tracing.py`` also opentelemetry (extra ``[otel]``). A process loads opentelemetry only if
OTEL_TRACES_EXPORTER names an exporter, or if the program has loaded opentelemetry.

Start with ``context.py`` (``current``: the traceparent for a call) and ``tracing.py`` (``tracer``).
"""
