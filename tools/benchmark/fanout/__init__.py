"""The benchmark of the fan-out: one admin verb to many stages, and to the ranks of a stage.

Its processes import gRPC before rlctl changes gRPC's settings (``rlctl/transport/__init__.py``). The bare streams of
the peers therefore have gRPC's own settings. The fleet runs in other processes.
"""

from __future__ import annotations

import grpc.aio  # noqa: F401

from tools.benchmark import fleet_pairs
from tools.benchmark.fanout import ranks, sizes
from tools.benchmark.figures import Figure

MTLS = Figure(
    "mtls_256",
    "FlushCache to 256 stages with TLS and a certificate of each process ÷ in plain text",
    "ratio",
    lambda setting: fleet_pairs.measure(setting, "mtls", mtls=True),
    at_most=1.3,
)

FIGURES: list[Figure] = [*sizes.FIGURES, ranks.FIGURE, MTLS]
