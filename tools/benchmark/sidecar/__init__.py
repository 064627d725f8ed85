"""Benchmark of the sidecar: its added time per request, in front of an upstream that answers at once."""

from __future__ import annotations

from tools.benchmark.figures import Figure
from tools.benchmark.sidecar import added

FIGURES = [
    Figure(
        "added_p50_c1",
        "median latency of POST /generate through the sidecar, less that at the upstream itself, one at a time",
        "ms",
        added.latency_alone,
        at_most=1.0,
    ),
    Figure(
        "cpu_c64",
        "CPU time of the sidecar's process for a request, 64 at a time",
        "ms",
        added.cpu_of_many,
    ),
]
