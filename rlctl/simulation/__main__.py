"""``tools/simulate --seeds N [--seed S] [--break NAME]``."""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time

from rlctl.simulation.fleet import Counts, Simulation
from rlctl.simulation.mutants import MUTANTS, without


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


class _History(logging.Handler):
    """What the state machines log goes into the history of the seed."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line."""
        self._simulation.observer.note(f"    {record.name.removeprefix('rlctl.')}: {record.getMessage()}")


def main() -> int:
    """Run seeds until one breaks a promise."""
    parser = argparse.ArgumentParser(prog="tools/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many seeds")
    parser.add_argument("--seed", type=int, help="the first one; drawn when not given")
    known = sorted(MUTANTS)
    parser.add_argument("--break", dest="off", action="append", default=[], choices=known, help="turn a safeguard off")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failing seed")
    parser.add_argument("--history", action="store_true", help="print what happened")
    arguments = parser.parse_args()
    log = logging.getLogger("rlctl")
    log.setLevel(logging.INFO)
    log.propagate = False
    sys.unraisablehook = lambda _: None
    first = arguments.seed if arguments.seed is not None else random.randrange(10**9)
    _say(f"seeds {first} to {first + arguments.seeds - 1}")
    total = Counts()
    began = time.monotonic()
    failing = 0
    for seed in range(first, first + arguments.seeds):
        simulation = Simulation(seed, frozenset(arguments.off))
        log.handlers = [_History(simulation)]
        with without(arguments.off):
            simulation.run()
        for name, value in vars(simulation.counts).items():
            setattr(total, name, getattr(total, name) + value)
        violations = simulation.observer.violations
        if violations or arguments.history:
            _say(f"seed {seed}")
            for line in simulation.observer.history:
                _say("  " + line)
        if violations:
            failing += 1
            for violation in violations:
                _say(f"seed {seed}: {violation}")
            if not arguments.keep_going:
                break
        del simulation
        gc.collect()
    seconds = time.monotonic() - began
    done = seed - first + 1
    _say(f"{done} seeds in {seconds:.1f} s ({done / seconds * 60:.0f} a minute), {failing} failing; on average:")
    _say("  " + ", ".join(f"{value / done:.1f} {name}" for name, value in vars(total).items()))
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
