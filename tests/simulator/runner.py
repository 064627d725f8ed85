"""A seed from its start to its result, in this process or in a worker process."""

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
    """The result of a seed.

    Attributes:
        violations: broken promises, "I1: what happened".
        steps: keys of requests and faults; each can be omitted in a further run.
        history: lines of events, if requested.
    """

    seed: int
    counts: Counts
    violations: list[str]
    steps: list[str]
    history: list[str]


class _History(logging.Handler):
    """Adds the log of the state machines to the history of the seed."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line at its first occurrence."""
        line = f"    {record.name.removeprefix('rlctl.')}: {record.getMessage()}"
        if line not in self._told:
            self._told.add(line)
            self._observer.note(line)


def run(
    seed: int, off: frozenset[str] = frozenset(), *, dropped: frozenset[str] = frozenset(), telling: bool = False
) -> Result:
    """Run a seed. A seed without a history runs several times faster, with the same course."""
    # A seed leaves cycles behind, all in the youngest generation. Their collection is cheapest there, if no collection
    # runs before the end of the seed.
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
        log.setLevel(level)  # loggers below cache their level
        log.propagate, log.handlers = before
    return Result(
        seed, simulation.counts, [str(broken) for broken in observer.violations], simulation.steps, observer.history
    )


def start_worker(off: frozenset[str]) -> None:
    """Record the switched-off safeguards in this worker process."""
    global _off
    _off = off
    sys.unraisablehook = lambda _: None


def run_in_worker(seed: int) -> Result:
    """Run a seed with the safeguards of :func:`start_worker`."""
    return run(seed, _off)
