"""checksum, checksum_keyed: an idle engine's digest of its weights, against hashlib and against a copy."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rlctl.v1.verbs_pb2 import CheckWeightsRequest
from rlctl.weights.tensor.tensors import as_bytes
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.rounds import interleaved, median, ratios
from tools.benchmark.weights import fleets
from tools.benchmark.weights.fleets import Running

KEY = bytes(range(16))


def _measure(setting: Setting) -> Reading:
    return measured(setting.shared(fleets.single), setting.rounds)


def measured(fleet: Running, rounds: int) -> Reading:
    """Measure CheckWeights of the fleet's engine beside hashlib over the same tensors in host memory."""
    held = (as_bytes(tensor).cpu() for tensor in fleet.source.weights.values())
    tensors = sorted(held, key=torch.Tensor.numel, reverse=True)
    cores = len(os.sched_getaffinity(0))
    sides = {
        "product": lambda: _checksum(fleet),
        "all_cores": lambda: _hash(tensors, cores),
        "largest": lambda: _hash(tensors[:1], 1),
    }
    seconds = interleaved(rounds, sides)
    nbytes = fleet.source.nbytes
    return Reading.of(
        ratios(seconds["all_cores"], seconds["product"]),
        floor=nbytes / median(seconds["all_cores"]) / 1e9,
        floor_unit="GB/s",
        product_gb_s=nbytes / median(seconds["product"]) / 1e9,
        largest_tensor_mib=tensors[0].nbytes / 2**20,
        largest_tensor_alone_gb_s=tensors[0].nbytes / median(seconds["largest"]) / 1e9,
    )


def _measure_keyed(setting: Setting) -> Reading:
    fleet = setting.shared(fleets.single)
    tensors = [as_bytes(tensor).cpu() for tensor in fleet.source.weights.values()]
    room = [torch.empty_like(tensor) for tensor in tensors]
    sides = {"product": lambda: _checksum(fleet, KEY), "copy": lambda: _copy(tensors, room)}
    seconds = interleaved(setting.rounds, sides)
    nbytes = fleet.source.nbytes
    return Reading.of(
        ratios(seconds["product"], seconds["copy"]),
        floor=nbytes / median(seconds["copy"]) / 1e9,
        floor_unit="GB/s",
        product_gb_s=nbytes / median(seconds["product"]) / 1e9,
    )


def _checksum(fleet: Running, key: bytes = b"") -> float:
    started = time.perf_counter()
    fleet.client.call(CheckWeightsRequest(digest_key=key), model="actor")
    return time.perf_counter() - started


def _copy(tensors: Sequence[torch.Tensor], room: Sequence[torch.Tensor]) -> float:
    """Copy the tensors on all cores."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda into, tensor: into.copy_(tensor), room, tensors))
    return time.perf_counter() - started


def _hash(tensors: Sequence[torch.Tensor], threads: int) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda tensor: hashlib.sha256(tensor.numpy().data).digest(), tensors))
    return time.perf_counter() - started


FIGURE = Figure(
    "checksum",
    "bytes/s of CheckWeights at an idle engine ÷ hashlib's SHA-256 over the same tensors on all cores",
    "ratio",
    _measure,
    at_least=0.9,
)
KEYED = Figure(
    "checksum_keyed",
    "time of CheckWeights by a keyed digest at an idle engine ÷ a copy of the same bytes on all cores",
    "ratio",
    _measure_keyed,
    at_most=1.2,
)
