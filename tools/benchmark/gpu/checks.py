"""checksum: an idle engine's digest of weights on a GPU, against hashlib on all cores over host memory."""

from __future__ import annotations

import dataclasses

from tools.benchmark.figures import Reading, Setting
from tools.benchmark.gpu import engine
from tools.benchmark.weights import checksum


def _measure(setting: Setting) -> Reading:
    return checksum.measured(setting.shared(engine.beside_trainer), setting.rounds)


FIGURE = dataclasses.replace(checksum.FIGURE, measure=_measure, at_least=None)
