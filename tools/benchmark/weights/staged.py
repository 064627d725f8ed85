"""staged_swap, staged_fleet_pause, extra_memory_staged: staged updates while every engine generates."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlctl.contract.durations import seconds
from rlctl.trainer.publisher import BUCKET_BYTES
from tools.benchmark.figures import Figure, Reading, Setting
from tools.benchmark.rounds import Spread, interleaved, median
from tools.benchmark.weights import fleets
from tools.benchmark.weights.fleets import Running
from tools.benchmark.weights.memory import peaks

ENGINES = 2
TOKENS = 200
"""Tokens of each request; the next request begins when a request ends."""

STEPS = 5
"""Decode steps of every engine before an update begins."""

SETTLED_S = 2.0
"""Time in which an engine returns the memory of the previous update."""

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Sample:
    """A staged update.

    Attributes:
        swap_s, transfer_s: of the rank with the longest swap: from the end of its last step until the new weights are
            in use, and its time to receive the weights.
        pause_s: from the first stage's pause to the last stage's resume.
        step_s: decode step of the slowest engine just before; 0 without requests.
        extra_bytes: largest memory of a rank's process above its memory at the start.
    """

    swap_s: float
    transfer_s: float
    pause_s: float
    step_s: float
    extra_bytes: int


@dataclass(frozen=True)
class Rounds:
    """``busy`` with requests running, ``idle`` without; ``copy_bytes``: size of a rank's weights."""

    busy: Sequence[Sample]
    idle: Sequence[Sample]
    copy_bytes: int


def rounds(setting: Setting) -> Rounds:
    """Measure staged updates of engines that each have the whole model."""
    with fleets.running(setting, fleets.model(setting), engines=ENGINES) as fleet:
        samples = interleaved(setting.rounds, {"busy": lambda: _busy(fleet), "idle": lambda: _update(fleet, 0.0)})
        return Rounds(**samples, copy_bytes=fleet.source.nbytes)


def _busy(fleet: Running) -> Sample:
    with _requests(fleet) as step_s:
        return _update(fleet, step_s)


def _update(fleet: Running, step_s: float) -> Sample:
    time.sleep(SETTLED_S)
    with peaks(fleet.engines) as extra:
        result = fleet.update(apply="staged").result
    ranks = [rank.weights for stage in result.operation.stage_results for rank in stage.rank_results]
    slowest = max(ranks, key=lambda weights: seconds(weights.swap))
    transfer_s = seconds(slowest.transfer) + seconds(slowest.load)
    return Sample(seconds(slowest.swap), transfer_s, result.pause_s, step_s, max(extra))


@contextlib.contextmanager
def _requests(fleet: Running) -> Iterator[float]:
    """Run a request on every engine; yield the decode step of the slowest engine."""
    stop = threading.Event()
    started = [threading.Event() for _ in range(ENGINES)]
    steps = [0.0] * ENGINES

    def generate(number: int) -> None:
        times: list[float] = []
        while not stop.is_set():
            request = fleet.client.generate_stream([1, 2, 3], max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            with contextlib.closing(request) as stream:
                for _ in stream:
                    times.append(time.perf_counter())
                    if len(times) == STEPS + 1:
                        steps[number] = statistics.median(b - a for a, b in itertools.pairwise(times))
                        started[number].set()
                    if stop.is_set():
                        break

    threads = [threading.Thread(target=generate, args=(number,), daemon=True) for number in range(ENGINES)]
    for thread in threads:
        thread.start()
    try:
        if not all(event.wait(PATIENCE_S) for event in started):
            raise TimeoutError("the engines generate nothing")
        yield max(steps)
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def _swap(setting: Setting) -> Reading:
    busy = setting.once(rounds).busy
    return Reading.of(
        Spread.of([sample.swap_s / sample.transfer_s for sample in busy]),
        swap_ms=median([sample.swap_s for sample in busy]) * 1e3,
        transfer_ms=median([sample.transfer_s for sample in busy]) * 1e3,
    )


def _pause(setting: Setting) -> Reading:
    made = setting.once(rounds)
    return Reading.of(
        Spread.of([(sample.pause_s - 2 * sample.step_s) * 1e3 for sample in made.busy]),
        pause_ms=median([sample.pause_s for sample in made.busy]) * 1e3,
        step_ms=median([sample.step_s for sample in made.busy]) * 1e3,
        pause_without_requests_ms=median([sample.pause_s for sample in made.idle]) * 1e3,
    )


def _memory(setting: Setting) -> Reading:
    made = setting.once(rounds)
    beyond = [(sample.extra_bytes - made.copy_bytes) / BUCKET_BYTES for sample in (*made.busy, *made.idle)]
    return Reading.of(
        Spread.of(beyond),
        extra_mib=median([sample.extra_bytes for sample in made.busy]) / 2**20,
        copy_mib=made.copy_bytes / 2**20,
        bucket_mib=BUCKET_BYTES / 2**20,
    )


SWAP = Figure(
    "staged_swap",
    "last step ended until the new weights are in use, slowest rank ÷ taking them in; requests run",
    "ratio",
    _swap,
    at_most=0.02,
)
PAUSE = Figure(
    "staged_fleet_pause",
    "first stage stops until the last resumes, less two decode steps of the slowest; requests run",
    "ms",
    _pause,
    at_most=20,
)
MEMORY = Figure(
    "extra_memory_staged",
    "most memory that a rank takes during a staged update beyond one copy of its weights ÷ bucket size",
    "ratio",
    _memory,
    at_most=2,
)
