"""``python -m tools.benchmark NAME [--quick] [--json] [--only ID]``, the program of ``tools/bench``.

The exit status is 0 when every figure was measured, whether or not goals are met: people judge the goals of a shared or
small machine. The exit status is 2 for an unknown benchmark or figure, and on a machine without the required hardware.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pkgutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tools import benchmark
from tools.benchmark import machine, report
from tools.benchmark.figures import Figure, Setting


def names() -> list[str]:
    """Return the names of the benchmarks: the sub-packages of this package."""
    return sorted(module.name for module in pkgutil.iter_modules(benchmark.__path__) if module.ispkg)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark."""
    parser = argparse.ArgumentParser(prog="tools/bench", description="Runs a benchmark and prints its figures.")
    parser.add_argument("name", choices=names(), help="benchmark")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: a smoke test, no measurement")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="only this figure; repeatable")
    given = parser.parse_args(arguments)
    package = importlib.import_module(f"tools.benchmark.{given.name}")
    if hasattr(package, "lacking") and (what := package.lacking()):
        parser.error(f"{given.name} cannot be measured here: {what}")
    figures: list[Figure] = package.FIGURES
    if unknown := sorted(set(given.only) - {figure.id for figure in figures}):
        parser.error(f"{given.name} has no figure {unknown[0]!r}; it has {', '.join(f.id for f in figures)}")
    chosen = [figure for figure in figures if not given.only or figure.id in given.only]

    errors = Console(stderr=True)
    described = machine.describe()
    with tempfile.TemporaryDirectory(prefix="rlctl-bench-") as directory:
        setting = Setting(Path(directory), quick=given.quick, say=lambda line: errors.print(line, style="dim"))
        entries = []
        with contextlib.closing(setting):
            for figure in chosen:
                setting.say(f"{figure.id}: {figure.what}")
                entries.append(report.entry(figure, figure.measure(setting)))
    result = report.document(given.name, described, entries)
    if given.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        report.show(result, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
