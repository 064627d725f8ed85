"""disk: an update from a checkpoint directory, against loading the file and copying its tensors into place."""

from __future__ import annotations

import time
from pathlib import Path

from rlctl.bench.figures import Figure, Reading, Setting
from rlctl.bench.rounds import interleaved, median, ratios
from rlctl.bench.weights import fleets
from rlctl.bench.weights.fleets import Running
from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_NONE
from rlctl.v1.verbs_pb2 import UpdateOptions


def _measure(setting: Setting) -> Reading:
    fleet = setting.shared(fleets.single)
    # Written a moment ago, the file is in the page cache; the warm-up reads it once more.
    sides = {
        "product": lambda: _update(fleet),
        "by_hand": lambda: fleet.peers.load(Path(fleet.checkpoint) / "model.safetensors"),
    }
    seconds = interleaved(setting.rounds, sides)
    nbytes = fleet.source.nbytes
    return Reading.of(
        ratios(seconds["product"], seconds["by_hand"]),
        floor=median(seconds["by_hand"]) * 1e3,
        floor_unit="ms by hand",
        update_ms=median(seconds["product"]) * 1e3,
        product_gb_s=nbytes / median(seconds["product"]) / 1e9,
    )


def _update(fleet: Running) -> float:
    started = time.perf_counter()
    fleet.client.update_weights_from_disk(
        fleet.checkpoint, model="actor", options=UpdateOptions(verify=VERIFICATION_LEVEL_NONE)
    )
    return time.perf_counter() - started


FIGURE = Figure(
    "disk",
    "update of one engine from disk ÷ load_file and copy_ of every tensor into memory that is there, page cache warm",
    "ratio",
    _measure,
    at_most=1.2,
)
