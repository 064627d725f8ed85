"""``tools/fuzz --inputs N [--seed S] [--first I] [--target PATTERN] [--jobs J]``."""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.fuzz.runner import BATCH, Found, Progress, Report, run


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Send random inputs; print faults with what repeats them, and counts of answers. Return 1 after a fault."""
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, metavar="N", help="number of inputs")
    parser.add_argument("--seed", type=int, metavar="S", help="drawn when absent")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="index of the first input")
    parser.add_argument("--target", default="*", metavar="PATTERN", help="targets, for example 'owner/*Pause*'")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    parser.add_argument(
        "--batch", type=int, default=BATCH, metavar="N", help="inputs between two checks of the servers"
    )
    parser.add_argument("--most-faults", type=int, default=20, metavar="N", help="a process stops after so many faults")
    parser.add_argument("--answers", action="store_true", help="print the answers of each target")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, handlers=[logging.NullHandler()])
    seed = arguments.seed if arguments.seed is not None else random.randrange(10**9)
    _say(f"seed {seed}, {arguments.inputs} inputs from {arguments.first} on")
    gc.collect()
    gc.freeze()  # of modules: the collections after each batch look at the rest
    began, total = time.monotonic(), Report(seed)
    share = -(-arguments.inputs // arguments.jobs)
    end = arguments.first + arguments.inputs
    parts = [range(first, min(first + share, end)) for first in range(arguments.first, end, share)]
    options = {"batch": arguments.batch, "most_faults": arguments.most_faults}
    if len(parts) == 1:
        total.add(run(seed, parts[0], arguments.target, **options, progress=_progress(arguments.batch)))
    else:
        with ProcessPoolExecutor(arguments.jobs) as pool:
            for future in [pool.submit(run, seed, part, arguments.target, **options) for part in parts]:
                total.add(future.result())
        for fault in total.faults:
            _say(_line(seed, fault, arguments.batch))
    _summarise(total, time.monotonic() - began, each=arguments.answers)
    return 1 if total.faults else 0


def _progress(batch: int) -> Progress:
    began, shown, reported = time.monotonic(), 0, 0

    def show(report: Report) -> None:
        nonlocal shown, reported
        for fault in report.faults[reported:]:
            _say(_line(report.seed, fault, batch))
        reported = len(report.faults)
        if report.inputs - shown >= 20_000:
            shown = report.inputs
            rate = report.inputs / (time.monotonic() - began)
            _say(f"{report.inputs} inputs, {rate:.0f} a second, {report.megabytes[-1]} MB, {reported} faults")

    return show


def _line(seed: int, fault: Found, batch: int) -> str:
    again = f"tools/fuzz --seed {seed} --first {fault.index}"
    if not fault.target:
        return f"FAULT after the batch from {fault.index} on: {fault.text}\n  {again} --inputs {batch}"
    return f"FAULT {fault.target}: {fault.text}\n  {again} --inputs 1 --target '{fault.target}'\n  {fault.content}"


def _summarise(total: Report, seconds: float, *, each: bool) -> None:
    if each:
        for name, counts in sorted(total.answers.items()):
            _say(f"{name}: {dict(counts.most_common())}")
    answers: Counter[str] = Counter()
    for counts in total.answers.values():
        answers.update(counts)
    _say(f"answers: {dict(answers.most_common())}")
    if total.megabytes:
        _say(f"memory: {total.megabytes[0]} MB after the first batch, {total.megabytes[-1]} MB at the end")
    rate = total.inputs / seconds
    _say(
        f"{total.inputs} inputs to {len(total.answers)} targets in {seconds:.0f} s ({rate:.0f} a second), "
        f"{len(total.faults)} faults"
    )


if __name__ == "__main__":
    sys.exit(main())
