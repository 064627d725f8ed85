"""The results of a benchmark, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.benchmark.figures import Figure, Reading


def entry(figure: Figure, reading: Reading) -> dict[str, Any]:
    """Return one figure of the JSON document."""
    return {
        "id": figure.id,
        "value": _short(reading.value),
        "unit": figure.unit,
        "floor": None if reading.floor is None else _short(reading.floor),
        "goal": figure.goal,
        "met": figure.met(reading.value),
        "better": None if figure.goal is None else "higher" if figure.at_least is not None else "lower",
        "spread": [_short(reading.low), _short(reading.high)],
        "floor_unit": reading.floor_unit,
        "what": figure.what,
        "details": {name: _short(value) for name, value in reading.details.items()},
    }


def document(name: str, machine: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON document."""
    return {"name": name, "machine": dict(machine), "figures": list(entries)}


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a document for people."""
    table = Table(title=f"bench {result['name']}")
    for column in ("figure", "value", "quartiles", "goal", "met", "floor", "details"):
        table.add_column(column, no_wrap=column == "figure", overflow="fold")
    for figure in result["figures"]:
        bound = "≥" if figure["better"] == "higher" else "≤"
        table.add_row(
            figure["id"],
            f"{figure['value']:g} {figure['unit']}",
            "{:g} … {:g}".format(*figure["spread"]),
            "reported" if figure["goal"] is None else f"{bound} {figure['goal']:g}",
            "" if figure["goal"] is None else "yes" if figure["met"] else "NO",
            "" if figure["floor"] is None else f"{figure['floor']:g} {figure['floor_unit']}",
            ", ".join(f"{name} {value:g}" for name, value in figure["details"].items()),
        )
    console.print(table)
    for name, value in result["machine"].items():
        console.print(f"{name}: {value}", highlight=False, markup=False)


def _short(value: float) -> float:
    """Round to four significant digits: more would claim a precision that no round has."""
    return float(f"{value:.4g}")
