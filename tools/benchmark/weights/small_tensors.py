"""small_tensors: many small tensors as one update, against one RPC and one broadcast for each tensor."""

from __future__ import annotations

from rlctl.weights.tensor.tensors import as_bytes
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.rounds import interleaved, median, ratios
from tools.benchmark.weights import fleets
from tools.benchmark.weights.shapes import SMALL_TENSORS
from tools.benchmark.weights.updates import RECEIVERS

COUNT = 500
TENSOR_BYTES = 64 << 10


def _measure(setting: Setting) -> Reading:
    with fleets.running(setting, SMALL_TENSORS, engines=RECEIVERS) as fleet:
        small = [pair for pair in fleet.source.weights.items() if pair[1].nbytes == TENSOR_BYTES][:COUNT]
        by_hand = [as_bytes(tensor) for _, tensor in small]
        sides = {
            "product": lambda: fleet.update(small, partial=True).total_s,
            "one_by_one": lambda: fleet.peers.one_by_one(by_hand),
        }
        seconds = interleaved(setting.rounds, sides)
    return Reading.of(
        ratios(seconds["product"], seconds["one_by_one"]),
        floor=median(seconds["one_by_one"]) * 1e3,
        floor_unit="ms one by one",
        update_ms=median(seconds["product"]) * 1e3,
        tensors=len(small),
    )


FIGURE = Figure(
    "small_tensors",
    "500 tensors of 64 KiB to 2 receivers, begin to resumed ÷ one RPC and one broadcast for each tensor",
    "ratio",
    _measure,
    at_most=0.25,
)
