"""disk: an update from a checkpoint directory, against safetensors' load_file onto the GPU and copies into place."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlctl.v1.common_pb2 import VERIFICATION_LEVEL_NONE
from rlctl.v1.verbs_pb2 import UpdateOptions
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.gpu import engine
from tools.benchmark.rounds import interleaved, median, ratios
from tools.benchmark.weights.fleets import Running


def _measure(setting: Setting) -> Reading:
    fleet = setting.shared(engine.beside_trainer)
    targets = {name: torch.empty_like(tensor) for name, tensor in fleet.source.weights.items()}
    sides = {"product": lambda: _update(fleet), "by_hand": lambda: _by_hand(fleet, targets)}
    samples = interleaved(setting.rounds, sides)
    return Reading.of(
        ratios(samples["product"], samples["by_hand"]),
        floor=median(samples["by_hand"]) * 1e3,
        floor_unit="ms by hand",
        update_ms=median(samples["product"]) * 1e3,
        product_gb_s=fleet.source.nbytes / median(samples["product"]) / 1e9,
    )


def _update(fleet: Running) -> float:
    started = time.perf_counter()
    options = UpdateOptions(verify=VERIFICATION_LEVEL_NONE)
    fleet.client.update_weights_from_disk(fleet.checkpoint, model="actor", options=options)
    return time.perf_counter() - started


def _by_hand(fleet: Running, targets: dict[str, torch.Tensor]) -> float:
    started = time.perf_counter()
    loaded = load_file(Path(fleet.checkpoint) / "model.safetensors", device=engine.DEVICE)
    engine.copied_s([loaded[name] for name in targets], list(targets.values()))
    return time.perf_counter() - started


FIGURE = Figure(
    "disk", "update from disk ÷ load_file onto the GPU and a copy of every tensor, page cache warm", "ratio", _measure
)
