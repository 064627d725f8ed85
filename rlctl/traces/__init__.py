"""Traces by OpenTelemetry, of trainers, coordinators and gateways; off by default.

Decides when a process makes traces, which exporter takes them, and which traceparent a call carries. The spans are made
where their data is: ``coordinator/traces.py``, ``gateway/backend/generation_spans.py``, ``trainer/traces.py``.

Imports: contract; ``tracing.py`` also opentelemetry (extra ``[otel]``). A process loads it only if OTEL_TRACES_EXPORTER
names an exporter, or if its program has loaded it.

Start with ``context.py`` (``current``: the traceparent for a call) and ``tracing.py`` (``tracer``).
"""
