"""``rlctl plan``: the engines of a topology file, and the changes in a fleet that is up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlctl.cli.app.global_options import pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.commands.topology_flags import TopologyCommand, flags, options


@click.command(cls=TopologyCommand)
@options
@pass_settings
def plan(settings: Settings, /, file: Path | None, **option_values: Any) -> None:
    """Show what `up` with the same arguments would do: engines, ranks, GPUs, offsets; -o wide: command lines.

    If a fleet of that name is up on this machine, each engine is shown as added, removed, restarted with the reason, or
    unchanged.
    """
    from rlctl.cli.commands.plan_report import plan_view, prepare, warn
    from rlctl.cli.render.printer import show

    prepared = prepare(file, flags(option_values))
    warn(settings, prepared.problems)
    show(settings, plan_view(prepared))
