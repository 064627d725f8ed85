"""disk: an update from a checkpoint directory, against loading the file and copying its tensors into place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from rlctl.contract.durations import seconds
from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_NONE
from rlctl.v1.verbs_pb2 import UpdateOptions
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.rounds import interleaved, median, ratios
from tools.benchmark.weights import fleets
from tools.benchmark.weights.fleets import Running


class _Sample(NamedTuple):
    """Seconds of the whole update, and of reading into place."""

    total_s: float
    loading_s: float


def _measure(setting: Setting) -> Reading:
    fleet = setting.shared(fleets.single)
    # The new file is in the page cache; the warm-up reads it once more.
    sides = {"product": lambda: _update(fleet), "by_hand": lambda: _by_hand(fleet)}
    samples = interleaved(setting.rounds, sides)
    whole = {side: [sample.total_s for sample in taken] for side, taken in samples.items()}
    nbytes = fleet.source.nbytes
    return Reading.of(
        ratios(whole["product"], whole["by_hand"]),
        floor=median(whole["by_hand"]) * 1e3,
        floor_unit="ms by hand",
        update_ms=median(whole["product"]) * 1e3,
        control_ms=median([sample.total_s - sample.loading_s for sample in samples["product"]]) * 1e3,
        product_gb_s=nbytes / median(whole["product"]) / 1e9,
    )


def _update(fleet: Running) -> _Sample:
    started = time.perf_counter()
    operation = fleet.client.update_weights_from_disk(
        fleet.checkpoint, model="actor", options=UpdateOptions(verify=VERIFICATION_LEVEL_NONE)
    )
    total_s = time.perf_counter() - started
    ((rank,),) = (stage.rank_results for stage in operation.stage_results)
    return _Sample(total_s, seconds(rank.weights.load))


def _by_hand(fleet: Running) -> _Sample:
    loading_s = fleet.peers.load(Path(fleet.checkpoint) / "model.safetensors")
    return _Sample(loading_s, loading_s)


FIGURE = Figure(
    "disk",
    "update of one engine from disk ÷ load_file and copy_ of every tensor into memory that is there, page cache warm",
    "ratio",
    _measure,
    at_most=1.2,
)
