"""``rlctl down``: the end of a fleet that ``rlctl up`` started."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict

import click

from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.local_fleets import listed
from rlctl.cli.app.settings import Settings
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table
from rlctl.contract.errors import Reason
from rlctl.launch.supervisor import fleet_state
from rlctl.launch.supervisor.fleet_state import FleetState

STOP_S = 60.0
ENDS_S = 5.0
"""Seconds that the processes of a supervisor may outlive it."""
LOOK_S = 0.05


@click.command(cls=Command)
@click.option("--name", help="Name of the fleet.  [default: the only fleet that is up, else default]")
@pass_settings
def down(settings: Settings, name: str | None) -> None:
    """Take down a fleet that `up` started, detached or in another terminal, and wait until it is gone."""
    name = settings.fleet_name(name)
    running = fleet_state.read(name)
    if running is None and (file := fleet_state.state_file(name)).exists():
        raise click.ClickException(f"the state of fleet {name!r} in {file} cannot be read; nothing was done")
    if running is None:
        raise click.BadParameter(
            f"no fleet {name!r} is up on this machine; fleets that are up: {listed(fleet_state.up())}",
            param_hint="--name",
        )
    if not running.alive and running.survivors:
        raise click.ClickException(
            f"no fleet {name!r} is up on this machine: its supervisor {running.pid} has ended; {_still_ending(running)}"
        )
    if not running.alive:
        fleet_state.remove(name)
        raise click.ClickException(
            f"no fleet {name!r} is up on this machine: its supervisor {running.pid} ended without cleaning up; "
            "its processes ended with it"
        )
    if settings.dry_run:
        show(settings, _view(running))
        settings.say("Nothing was done.")
        return
    ending = len(running.processes) + 1  # the supervisor, too
    settings.confirm(f"Take down fleet {name!r} ({ending} processes at {running.endpoint})?")
    if running.alive:
        try:
            os.kill(running.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # the supervisor has ended by itself
        except PermissionError:
            raise click.ClickException(f"supervisor {running.pid} belongs to another user; nothing was done") from None
    limit_s = settings.timeout_s or STOP_S
    deadline = time.monotonic() + limit_s
    while running.alive:
        if time.monotonic() > deadline:
            raise Reason.DEADLINE_EXCEEDED.error(f"supervisor {running.pid} has not ended within {limit_s:g} s")
        time.sleep(LOOK_S)
    deadline = min(deadline, time.monotonic() + ENDS_S)
    while running.survivors and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    show(settings, _view(running))
    if running.survivors:
        raise click.ClickException(f"fleet {name!r} is down, and its supervisor has ended; {_still_ending(running)}")
    settings.say(f"Fleet {name} is down.")


def _still_ending(fleet: FleetState) -> str:
    return "still ending: " + ", ".join(f"{process} (pid {pid})" for process, pid in fleet.survivors.items())


def _view(stopped: FleetState) -> View:
    rows = [[name, str(pid)] for name, pid in {**stopped.processes, "supervisor": stopped.pid}.items()]
    return View(asdict(stopped), lambda _: [Table(("PROCESS", "PID"), rows)], lambda: list(stopped.processes))
