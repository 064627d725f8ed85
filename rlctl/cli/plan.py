"""``rlctl plan``: what a topology file starts, and what it changes in a fleet that is up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlctl.cli.options import pass_settings
from rlctl.cli.output import View, show
from rlctl.cli.settings import Settings
from rlctl.cli.topology import Prepared, TopologyCommand, flags, options, plan_tables, prepare, warn
from rlctl.topology.diff import difference


@click.command(cls=TopologyCommand)
@options
@pass_settings
def plan(settings: Settings, /, file: Path | None, **given: Any) -> None:
    """Show what `up` with the same arguments would do: engines, ranks, GPUs, offsets; -o wide: command lines.

    When a fleet of that name is up on this machine, each engine is to be added, removed, restarted (and why), or is
    unchanged.
    """
    prepared = prepare(file, flags(given))
    warn(settings, prepared.problems)
    show(settings, plan_view(prepared))


def plan_view(prepared: Prepared) -> View:
    """The plan, to print."""
    changes = difference(prepared.plan.specs, prepared.present) if prepared.running is not None else []
    obstacles = prepared.obstacles()
    data = {
        **prepared.plan.data,
        "changes": [{"slot": c.slot, "action": c.action, "fields": list(c.fields)} for c in changes],
        "obstacles": [problem.data for problem in obstacles],
    }
    return View(
        data,
        lambda wide: plan_tables(prepared.plan, changes, obstacles, wide=wide),
        lambda: [spec.slot for spec in prepared.plan.specs],
    )
