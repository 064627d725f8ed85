"""docs/reference/benchmarks.md: the stored results of ``tools/bench NAME --json``, a table for each benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.reference.markdown import prose, table

RESULTS = Path(__file__).parents[2] / "docs" / "benchmarks"

_INTRODUCTION = """\
The latest stored result of each benchmark. `tools/bench NAME --json > docs/benchmarks/NAME.json` replaces one, and
`tools/protos` writes this page. [benchmarks](../benchmarks.md) describes the rules, [history](../benchmarks/history.md)
has earlier results.

The value is the median of the rounds. *Floor* is the value of the peer in the same rounds. Results of a machine with
other work (*load*) cannot be compared with those of a quiet one.
"""


def page() -> Iterator[str]:
    """Yield a section for each stored result."""
    yield "# Results of the benchmarks\n"
    yield from prose(_INTRODUCTION)
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        yield f"## {result['name']}\n"
        yield _machine(result["machine"]) + "\n"
        header = ["figure", "what", "value", "quartiles", "goal", "met", "floor", "beside it"]
        yield from table(header, [_row(figure) for figure in result["figures"]])


def _machine(machine: Mapping[str, Any]) -> str:
    gpus = ", ".join(str(gpu) for gpu in machine["gpus"]) or "no GPU"
    return (
        f"{machine['date'][:10]}, commit {machine['commit']}, {machine['usable_cores']} cores ({machine['cpu']}), "
        f"{machine['memory_gib']} GiB, {gpus}, load {machine['load_1m']}, Python {machine['python']}, "
        f"torch {machine['torch']}."
    )


def _row(figure: Mapping[str, Any]) -> list[str]:
    goal, floor = figure["goal"], figure["floor"]
    return [
        figure["id"],
        figure["what"],
        f"{figure['value']:g} {figure['unit'].replace('ratio', '')}",
        "{:g} … {:g}".format(*figure["spread"]),
        "reported" if goal is None else f"{'≥' if figure['better'] == 'higher' else '≤'} {goal:g}",
        "" if goal is None else "yes" if figure["met"] else "**no**",
        "" if floor is None else f"{floor:g} {figure['floor_unit']}",
        ", ".join(f"{name} {value:g}" for name, value in figure["details"].items()),
    ]
