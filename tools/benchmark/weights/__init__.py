"""The benchmark of weight updates."""

from __future__ import annotations

from tools.benchmark.figures import Figure
from tools.benchmark.weights import broadcast, checksum, control, delta, disk, overhead, shared, small_tensors, staged

FIGURES: list[Figure] = [
    broadcast.TP1,
    broadcast.TP2,
    broadcast.VERIFIED,
    broadcast.KEYED,
    small_tensors.FIGURE,
    overhead.CONTROL,
    overhead.DECODE_CHECK,
    control.BUCKET,
    control.REST,
    overhead.GROUPS,
    overhead.STALL,
    shared.TENSOR,
    shared.TENSOR_COPY,
    disk.FIGURE,
    delta.BY_GROUP,
    delta.BY_FILES,
    checksum.FIGURE,
    checksum.KEYED,
    overhead.MEMORY,
    staged.SWAP,
    staged.PAUSE,
    staged.MEMORY,
]
