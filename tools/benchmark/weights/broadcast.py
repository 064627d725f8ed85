"""broadcast_*: a whole update, verified or not, against a bare broadcast of equal size."""

from __future__ import annotations

from collections.abc import Sequence

from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.rounds import median, ratios
from tools.benchmark.weights.updates import Rounds, Sample, tp1, tp2

LINK_BYTES_S = 40e9
"""A typical link of trainers and engines; the loopback of a small machine is slower than their control plane."""


def _reading(rounds: Rounds, samples: Sequence[Sample]) -> Reading:
    bare = [sample.total_s for sample in rounds.bare]
    whole = [sample.total_s for sample in samples]
    control_s = median([sample.control_s for sample in samples])
    on_link_s = rounds.nbytes / LINK_BYTES_S
    return Reading.of(
        ratios(bare, whole),
        floor=rounds.nbytes / median(bare) / 1e9,
        floor_unit="GB/s",
        product_gb_s=rounds.nbytes / median(whole) / 1e9,
        update_ms=median(whole) * 1e3,
        control_ms=control_s * 1e3,
        ratio_at_40_gb_s=on_link_s / (on_link_s + control_s),
    )


def _tp1(setting: Setting) -> Reading:
    rounds = setting.once(tp1)
    return _reading(rounds, rounds.plain)


def _tp2(setting: Setting) -> Reading:
    rounds = setting.once(tp2)
    return _reading(rounds, rounds.plain)


def _verified(setting: Setting) -> Reading:
    rounds = setting.once(tp1)
    return _reading(rounds, rounds.verified)


def _keyed(setting: Setting) -> Reading:
    rounds = setting.once(tp1)
    return _reading(rounds, rounds.keyed)


TP1 = Figure(
    "broadcast_tp1",
    "bytes/s of a whole update to 2 receivers ÷ a bare broadcast of one flat buffer between the same processes",
    "ratio",
    _tp1,
    at_least=0.95,
)
TP2 = Figure(
    "broadcast_tp2",
    "the same to 2 receivers of 2 ranks, each of which keeps its slice",
    "ratio",
    _tp2,
    at_least=0.75,
)
VERIFIED = Figure(
    "broadcast_verified", "as broadcast_tp1, with SHA-256 digests at both ends compared", "ratio", _verified
)
KEYED = Figure("broadcast_keyed", "the same by keyed digests, as by default", "ratio", _keyed, at_least=0.85)
