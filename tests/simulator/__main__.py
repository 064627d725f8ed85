"""``tools/simulate --seeds N [--seed S] [--break NAME] [--jobs J]``."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields

from tests.simulator.context import Counts
from tests.simulator.mutants import MUTANTS
from tests.simulator.runner import Result, run, run_in_worker, start_worker
from tests.simulator.shrink import shrink

TRIALS = 150
"""Most runs to shrink a failing seed."""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _progress(text: str) -> None:
    """Show progress on a terminal; "" clears the line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def main() -> int:
    """Run seeds until a promise is broken; print the history and the needed steps of the failing seed."""
    parser = argparse.ArgumentParser(prog="tools/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many seeds")
    parser.add_argument("--seed", type=int, metavar="S", help="the first one; drawn when not given")
    known = sorted(MUTANTS)
    parser.add_argument("--break", dest="off", action="append", default=[], choices=known, help="turn a safeguard off")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help="processes; default: CPUs")
    parser.add_argument("--keep-going", action="store_true", help="only count the seeds that fail")
    parser.add_argument("--history", action="store_true", help="print what happens in a seed that does not fail, too")
    parser.add_argument("--no-shrink", action="store_true", help="print the whole history of a failing seed")
    arguments = parser.parse_args()
    off = frozenset(arguments.off)
    first = arguments.seed if arguments.seed is not None else random.randrange(10**9)
    seeds = range(first, first + arguments.seeds)
    _say(f"seeds {first} to {seeds[-1]}")
    total, done, failing = Counts(), 0, 0
    began = time.monotonic()
    for result in _results(seeds, off, arguments.jobs):
        done += 1
        _progress(f"{done} of {len(seeds)} seeds" if done < len(seeds) and not result.violations else "")
        total.add(result.counts)
        if result.violations:
            failing += 1
            for violation in result.violations:
                _say(f"seed {result.seed}: {violation}")
            if not arguments.keep_going:
                _explain(result, off, whole=arguments.no_shrink)
                break
        elif arguments.history:
            _tell(run(result.seed, off, telling=True))
    seconds = time.monotonic() - began
    _say(f"{done} seeds in {seconds:.1f} s ({done / seconds * 60:.0f} a minute), {failing} failing; on average:")
    averages = (f"{getattr(total, field.name) / done:.1f} {field.name}" for field in fields(total))
    _say("  " + ", ".join(averages))
    return 1 if failing else 0


def _results(seeds: range, off: frozenset[str], jobs: int) -> Iterator[Result]:
    """Yield the result of each seed, in order."""
    if jobs == 1 or len(seeds) == 1:
        yield from (run(seed, off) for seed in seeds)
        return
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(jobs, initializer=start_worker, initargs=(off,)))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        yield from pool.map(run_in_worker, seeds, chunksize=max(1, min(20, len(seeds) // jobs // 4)))


def _explain(result: Result, off: frozenset[str], *, whole: bool) -> None:
    if not whole:
        _say(f"  running it up to {TRIALS} times more, for what of it is needed (--no-shrink does not)")
    needed = frozenset[str]() if whole else shrink(result, off, TRIALS)
    again = run(result.seed, off, dropped=needed, telling=True)
    _tell(again)
    _say(f"  left out, it fails without them: {len(needed)} of {len(result.steps)} things asked and faults")


def _tell(result: Result) -> None:
    _say(f"seed {result.seed}")
    for line in result.history:
        _say("  " + line)


if __name__ == "__main__":
    sys.exit(main())
