"""ipc, ipc_stall, staged_pause, verified, gloo: whole updates of an engine on the trainer's GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlctl.contract.durations import seconds
from rlctl.weights.tensor.tensors import as_bytes
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.gpu import engine
from tools.benchmark.rounds import Spread, interleaved, median, ratios
from tools.benchmark.weights.fleets import Update


@dataclass(frozen=True)
class Rounds:
    """Results by round: seconds of the floors, and updates of each kind.

    Attributes:
        nbytes: size of the weights.
        copies: every tensor copied once within the GPU's memory.
        broadcast: one flat buffer of equal size broadcast over gloo between the same processes, in host memory.
        ipc, verified, staged: by handle; the same with the SHA-256 model digest compared; the same into a shadow copy.
        gloo: over a gloo group.
    """

    nbytes: int
    copies: Sequence[float]
    broadcast: Sequence[float]
    ipc: Sequence[Update]
    verified: Sequence[Update]
    staged: Sequence[Update]
    gloo: Sequence[Update]


def rounds(setting: Setting) -> Rounds:
    """Run updates and floors in turns. The warm-up makes segments, groups and mappings."""
    fleet = setting.shared(engine.beside_trainer)
    weights = list(fleet.source.weights.values())
    targets = [torch.empty_like(tensor) for tensor in weights]
    flat = torch.cat([as_bytes(tensor).cpu() for tensor in weights])
    with contextlib.closing(fleet.client.publisher("actor", path="ipc", trainer="by-handle")) as handles:
        sides = {
            "copies": lambda: engine.copied_s(weights, targets),
            "broadcast": lambda: fleet.peers.broadcast(flat),
            "ipc": lambda: fleet.update(publisher=handles),
            "verified": lambda: fleet.update(publisher=handles, verify="expected", digest="sha256"),
            "staged": lambda: fleet.update(publisher=handles, apply="staged"),
            "gloo": fleet.update,
        }
        samples = interleaved(setting.rounds, sides)
    return Rounds(fleet.source.nbytes, **samples)  # type: ignore[arg-type]


def _totals(updates: Sequence[Update]) -> list[float]:
    return [update.total_s for update in updates]


def _ipc(setting: Setting) -> Reading:
    made = setting.once(rounds)
    ranks = [
        rank.weights
        for update in made.ipc
        for stage in update.result.operation.stage_results
        for rank in stage.rank_results
    ]
    return Reading.of(
        ratios(_totals(made.ipc), [2 * copy for copy in made.copies]),
        floor=median(made.copies) * 2e3,
        floor_unit="ms of two copies",
        update_ms=median(_totals(made.ipc)) * 1e3,
        load_ms=median([seconds(weights.load) for weights in ranks]) * 1e3,
        product_gb_s=made.nbytes / median(_totals(made.ipc)) / 1e9,
    )


def _stall(setting: Setting) -> Reading:
    made = setting.once(rounds)
    return Reading.of(
        ratios([update.sent_s for update in made.ipc], made.copies),
        floor=median(made.copies) * 1e3,
        floor_unit="ms of one copy",
        stall_ms=median([update.sent_s for update in made.ipc]) * 1e3,
    )


def _pause(setting: Setting) -> Reading:
    made = setting.once(rounds)
    return Reading.of(
        Spread.of([update.result.pause_s * 1e3 for update in made.staged]),
        in_place_ms=median([update.result.pause_s for update in made.ipc]) * 1e3,
        update_ms=median(_totals(made.staged)) * 1e3,
    )


def _verified(setting: Setting) -> Reading:
    made = setting.once(rounds)
    return Reading.of(ratios(_totals(made.verified), _totals(made.ipc)), update_ms=median(_totals(made.verified)) * 1e3)


def _gloo(setting: Setting) -> Reading:
    made = setting.once(rounds)
    return Reading.of(
        ratios(made.broadcast, _totals(made.gloo)),
        floor=made.nbytes / median(made.broadcast) / 1e9,
        floor_unit="GB/s",
        product_gb_s=made.nbytes / median(_totals(made.gloo)) / 1e9,
        update_ms=median(_totals(made.gloo)) * 1e3,
    )


IPC = Figure("ipc", "by handle: whole update, begin to resumed ÷ two copies of every tensor by the GPU", "ratio", _ipc)
IPC_STALL = Figure(
    "ipc_stall", "by handle: until the trainer may overwrite its weights ÷ one copy of every tensor", "ratio", _stall
)
STAGED_PAUSE = Figure("staged_pause", "by handle, staged: the stage's pause until it resumes; idle", "ms", _pause)
VERIFIED = Figure("verified", "by handle: update with the SHA-256 model digest compared ÷ without", "ratio", _verified)
GLOO = Figure("gloo", "bare broadcast of one flat buffer in host memory ÷ update over a gloo group", "ratio", _gloo)
