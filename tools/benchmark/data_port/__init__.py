"""Benchmark of the data port: its added time per request, alone and behind a gateway.

The upstream answers at once.
"""

from __future__ import annotations

from tools.benchmark.data_port import added, memory
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
        "gateway_added_p50_c1",
        "median latency of a request through gateway and data port, less that at the upstream itself, one at a time",
        "ms",
        added.latency_of_both,
        at_most=1.2,
    ),
    Figure(
        "cpu_c64",
        "CPU time of the stage's process for a request, 64 at a time",
        "ms",
        added.cpu_of_many,
    ),
    Figure(
        "memory_requests",
        "growth of the stage's or the gateway's memory over 100,000 requests through both",
        "MiB",
        memory.of_requests,
        at_most=16,
    ),
    Figure(
        "memory_refused",
        "growth of the stage's or the gateway's memory over 1,000 bodies of 60 MB that the stage refuses",
        "MiB",
        memory.of_refused,
        at_most=16,
    ),
]
