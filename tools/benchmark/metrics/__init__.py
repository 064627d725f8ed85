"""The benchmark of metrics: their cost at the serving processes, with a read every second."""

from __future__ import annotations

from tools.benchmark.figures import Figure
from tools.benchmark.metrics import fan_out, generation

AT_MOST = 1.05

FIGURES: list[Figure] = [
    Figure(
        "fan_out",
        "FlushCache to 256 stages with metrics of the coordinator ÷ without",
        "ratio",
        fan_out.measure,
        at_most=AT_MOST,
    ),
    Figure(
        "stage_streams",
        "300 streams at a stage, 32 at a time, a message for each token: with metrics ÷ without",
        "ratio",
        generation.streams,
        at_most=AT_MOST,
    ),
    Figure(
        "gateway_requests",
        "300 requests through a gateway, 32 at a time: with metrics of gateway and stage ÷ without",
        "ratio",
        generation.requests,
        at_most=AT_MOST,
    ),
    Figure(
        "torch_streams",
        "300 streams of 16 tokens at a torch engine with a tiny model, 32 at a time: with metrics ÷ without",
        "ratio",
        generation.torch_streams,
        at_most=AT_MOST,
    ),
    Figure(
        "torch_requests",
        "300 requests of 16 tokens at a torch engine with a tiny model through a gateway, 32 at a time: with metrics ÷ "
        "without",
        "ratio",
        generation.torch_requests,
        at_most=AT_MOST,
    ),
]
