"""``rlctl logs``: the logs of a fleet that ``rlctl up`` started on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import MACHINE_FORMATS, Settings
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import prose
from rlctl.launch.supervisor import fleet_state

LOOK_S = 0.2
BLOCK = 1 << 16


@click.command(cls=Command)
@click.argument("process", metavar="SLOT[.RANK]")
@click.option("-n", "--lines", default=50, show_default=True, type=click.IntRange(1), help="Last lines to show.")
@click.option("-f", "--follow", is_flag=True, help="Follow the log until Ctrl-C.")
@click.option("--name", help="Name of the fleet.  [default: the only fleet that is up, else default]")
@pass_settings
def logs(settings: Settings, process: str, lines: int, follow: bool, name: str | None) -> None:
    """Show the log of an engine: of its rank 0, or of another rank (`actor-0.1`).

    `coordinator`, `supervisor` and `gateway-MODEL` name the other processes of a fleet. A fleet that is down keeps its
    logs. `rlctl describe stage` shows the last lines of a failed engine, also of one on another machine.
    """
    log = _find(settings.fleet_name(name), process)
    tail, end = _last(log, lines)
    if settings.output in MACHINE_FORMATS:
        about = {"process": process, "log": str(log), "lines": tail}
        show(settings, View(about, lambda _: [prose(tail)], lambda: [str(log)]))
    else:
        for line in tail:
            click.echo(line)
    if follow:
        _follow(log, end)


def _find(name: str, process: str) -> Path:
    """Return the log of a process. Raises a usage error that lists the existing logs."""
    directory = fleet_state.state_directory(name) / "logs"
    log_files = {path.name.removesuffix(".log"): path for path in directory.glob("*.log")}
    if process not in log_files:
        processes = ", ".join(sorted(log_files)) or "none"
        other_fleets = ", ".join(
            sorted({log.parents[1].name for log in fleet_state.state_directory("").glob("*/logs/*.log")})
        )
        raise click.BadParameter(
            f"fleet {name!r} has no log of {process!r} on this machine; there are: {processes}; "
            f"fleets with logs (--name): {other_fleets or 'none'}",
            param_hint="SLOT",
        )
    return log_files[process]


def _last(log: Path, lines: int) -> tuple[list[str], int]:
    """Return the last lines, and the offset of the end. An unfinished line is not read."""
    with log.open("rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        data = b""
        while start > 0 and data.count(b"\n") <= lines:
            start = max(0, start - BLOCK)
            file.seek(start)
            data = file.read(end - start)
    complete_lines = data[: data.rfind(b"\n") + 1]
    read = complete_lines.decode(errors="replace").splitlines()
    return read[-lines:], end - len(data) + len(complete_lines)


def _follow(log: Path, position: int) -> None:
    """Print new lines of a log. A rotated log is read from the start."""
    while True:
        with log.open("rb") as file:
            if os.fstat(file.fileno()).st_size < position:
                position = 0
            file.seek(position)
            data = file.read()
        complete_lines = data[: data.rfind(b"\n") + 1]
        if complete_lines:
            click.echo(complete_lines.decode(errors="replace"), nl=False)
            position += len(complete_lines)
        else:
            time.sleep(LOOK_S)
