"""Benchmark of the paths of a request: through the SDK, through the gateway, and through sglang-router.

The servers behind them answer at once with the same tokens. Behind sglang-router the server is an HTTP server, as the
router worker. Behind the SDK and the gateway the server is a stage server with an engine that computes nothing. For
some figures, a torch engine with a tiny model is behind all paths. Each server is a process.
"""

from __future__ import annotations

from tools.benchmark.figures import Figure
from tools.benchmark.rollout import added, admin, rates, staleness

FIGURES = [
    Figure(
        "sdk_added",
        "median latency that the SDK adds to a bare gRPC client ÷ that of sglang-router for HTTP, one at a time",
        "ratio",
        added.sdk,
        at_most=0.1,
    ),
    Figure(
        "sdk_rps_c1",
        "requests a second through the SDK ÷ of an aiohttp client through sglang-router, one at a time",
        "ratio",
        rates.sdk_alone,
        at_least=1.0,
    ),
    Figure(
        "sdk_rps",
        "requests a second through the SDK ÷ of an aiohttp client through sglang-router, 64 at a time",
        "ratio",
        rates.sdk,
        at_least=1.0,
    ),
    Figure(
        "stream_rps",
        "streams a second, a message for each of 16 tokens, through the SDK ÷ through sglang-router, 64 at a time",
        "ratio",
        rates.streams,
    ),
    Figure(
        "gateway_rps",
        "requests a second of an aiohttp client through the gateway ÷ through sglang-router, 64 at a time",
        "ratio",
        rates.gateway,
    ),
    Figure(
        "torch_rps_c1",
        "requests a second of a torch engine through the SDK ÷ through sglang-router and the gateway, one at a time",
        "ratio",
        rates.torch_alone,
    ),
    Figure(
        "torch_rps",
        "requests a second of a torch engine through the SDK ÷ through sglang-router and the gateway, 64 at a time",
        "ratio",
        rates.torch,
    ),
    Figure(
        "stale_tokens",
        "tokens of a version older than the one published when they were asked for, over updates, joins and restarts",
        "tokens",
        staleness.measure,
        at_most=0,
    ),
    Figure(
        "admin_under_load",
        "99th percentile of an admin call with 4,000 open streams ÷ without any",
        "ratio",
        admin.measure,
        at_most=2.0,
    ),
]
