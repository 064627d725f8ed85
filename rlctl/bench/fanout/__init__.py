"""The benchmark of the fan-out: one admin verb to many stages, and to the ranks of one."""

from __future__ import annotations

from rlctl.bench.fanout import ranks, sizes
from rlctl.bench.figures import Figure

FIGURES: list[Figure] = [*sizes.FIGURES, ranks.FIGURE]
