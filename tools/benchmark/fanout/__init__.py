"""The benchmark of the fan-out: one admin verb to many stages, and to the ranks of one.

In its processes gRPC is imported before rlctl does it as it wants (``rlctl/transport/__init__.py``): the peers' bare
streams are those of gRPC by itself. The fleet's processes are apart from them.
"""

from __future__ import annotations

import grpc.aio  # noqa: F401

from tools.benchmark.fanout import ranks, sizes
from tools.benchmark.figures import Figure

FIGURES: list[Figure] = [*sizes.FIGURES, ranks.FIGURE]
