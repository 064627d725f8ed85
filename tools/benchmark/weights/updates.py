"""Rounds of whole updates beside bare broadcasts of equal size: several figures are read from the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.weights.tensor.tensors import as_bytes
from tools.benchmark.figures import Setting
from tools.benchmark.rounds import interleaved
from tools.benchmark.weights import collectives, fleets
from tools.benchmark.weights.fleets import Running
from tools.benchmark.weights.memory import peaks

RECEIVERS = 2


@dataclass(frozen=True)
class Sample:
    """A round of one side.

    Attributes:
        total_s: total time.
        control_s: of an update: time that is neither collective nor copying into place.
        receiving_s: of an update: from a rank's first broadcast to its last copy, for the slowest rank.
        sent_s: of an update: from the call until the source's tensors may be overwritten.
        extra_bytes: largest memory of a rank's process above its memory at the start.
    """

    total_s: float
    control_s: float = 0.0
    receiving_s: float = 0.0
    sent_s: float = 0.0
    extra_bytes: int = 0


@dataclass(frozen=True)
class Rounds:
    """Results of the rounds with one kind of fleet.

    Attributes:
        nbytes: size of the weights.
        bare, plain, verified, keyed, checked: the sides' samples, round by round.
        formed: groups formed by the first update, and by all later updates together.
    """

    nbytes: int
    bare: Sequence[Sample]
    plain: Sequence[Sample]
    verified: Sequence[Sample]
    keyed: Sequence[Sample]
    checked: Sequence[Sample]
    formed: tuple[int, int]


def tp1(setting: Setting) -> Rounds:
    """Measure receivers that each have the whole model."""
    return _rounds(setting, tp_size=1)


def tp2(setting: Setting) -> Rounds:
    """Measure receivers of two ranks that each have a slice."""
    return _rounds(setting, tp_size=2)


def _rounds(setting: Setting, *, tp_size: int) -> Rounds:
    with fleets.running(setting, fleets.model(setting), engines=RECEIVERS, tp_size=tp_size) as fleet:
        # Real bytes: memory that was never written is one page of zeros, and costs nothing to read.
        flat = torch.cat([as_bytes(tensor) for tensor in fleet.source.weights.values()])
        fleet.update()
        first = _groups_formed(fleet)
        sides = {
            "bare": lambda: Sample(fleet.peers.broadcast(flat)),
            "plain": lambda: _update(fleet, "none"),
            "verified": lambda: _update(fleet, "expected", digest="sha256"),
            "keyed": lambda: _update(fleet, "expected", digest="keyed"),
            "checked": lambda: _update(fleet, "none", decode_check=True),
        }
        samples = interleaved(setting.rounds, sides)
        return Rounds(fleet.source.nbytes, **samples, formed=(first, _groups_formed(fleet) - first))


def _update(fleet: Running, verify: str, *, digest: str = "", decode_check: bool = False) -> Sample:
    with collectives.timed() as sending, peaks(fleet.engines) as extra:
        fleet.peers.watch()
        update = fleet.update(verify=verify, digest=digest, decode_check=decode_check)
        ranks = fleet.peers.watched()
    control_s = update.total_s - collectives.busy_s(sending, ranks)
    receiving_s = max(max(end for _, end in taken) - min(start for start, _ in taken) for taken, _ in ranks)
    return Sample(update.total_s, control_s, receiving_s, update.sent_s, max(extra))


def _groups_formed(fleet: Running) -> int:
    made = fleet.client.operations(verb="InitWeightsUpdateGroup", page_size=1000)
    return sum(operation.state == OPERATION_STATE_OK for operation in made)
