"""Benchmark of the data port: its added time per request, in front of an upstream that answers at once."""

from __future__ import annotations

from tools.benchmark.data_port import added
from tools.benchmark.figures import Figure

FIGURES = [
    Figure(
        "added_p50_c1",
        "median latency of a request through the data port, less that at the upstream itself, one at a time",
        "ms",
        added.latency_alone,
        at_most=0.5,
    ),
    Figure(
        "cpu_c64",
        "CPU time of the data port's process for a request, 64 at a time",
        "ms",
        added.cpu_of_many,
    ),
]
