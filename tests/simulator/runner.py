"""One seed from its beginning to what came of it, in this process or in a worker."""

from __future__ import annotations

import gc
import logging
import sys
from dataclasses import dataclass

from tests.simulator.context import Counts, Simulation
from tests.simulator.mutants import without
from tests.simulator.oracle import Observer
from tests.simulator.scenario import Seed

_off: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Result:
    """What came of a seed.

    Attributes:
        violations: promises that were broken, "I1: what happened".
        steps: keys of what was asked and of the faults; any of them can be left out of another run.
        history: what happened, if it was to be told.
    """

    seed: int
    counts: Counts
    violations: list[str]
    steps: list[str]
    history: list[str]


class _History(logging.Handler):
    """What the state machines log goes into the history of the seed."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line, the first time that it is said."""
        line = f"    {record.name.removeprefix('rlctl.')}: {record.getMessage()}"
        if line not in self._told:
            self._told.add(line)
            self._observer.note(line)


def run(
    seed: int, off: frozenset[str] = frozenset(), *, dropped: frozenset[str] = frozenset(), telling: bool = False
) -> Result:
    """Run a seed. A seed without a history is run several times faster, and is the same in all other respects."""
    # What a seed leaves behind is in cycles. It is all in the youngest generation, where it is collected at the least
    # cost, if nothing has been collected before the seed is over.
    gc.disable()
    try:
        return _run(seed, off, dropped, telling=telling)
    finally:
        gc.collect(0)
        gc.enable()


def _run(seed: int, off: frozenset[str], dropped: frozenset[str], *, telling: bool) -> Result:
    log = logging.getLogger("rlctl")
    level, before = log.level, (log.propagate, log.handlers)
    simulation = Simulation(seed, off, dropped, telling=telling)
    observer = simulation.observer
    log.propagate, log.handlers = False, [_History(observer)] if telling else []
    log.setLevel(logging.INFO if telling else logging.CRITICAL + 1)
    try:
        with without(off):
            Seed(simulation).run()
    finally:
        log.setLevel(level)  # the loggers below it keep what they may log in a cache
        log.propagate, log.handlers = before
    return Result(
        seed, simulation.counts, [str(broken) for broken in observer.violations], simulation.steps, observer.history
    )


def start_worker(off: frozenset[str]) -> None:
    """Remember which safeguards are off in this worker process."""
    global _off
    _off = off
    sys.unraisablehook = lambda _: None


def run_in_worker(seed: int) -> Result:
    """Run a seed with what :func:`start_worker` was given."""
    return run(seed, _off)
