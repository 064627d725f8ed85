"""``rlctl up``: a fleet of local processes, in the foreground or under a separate supervisor."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlctl.cli.app.global_options import pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.commands.topology_flags import TopologyCommand, flags, options
from rlctl.cli.render.errors import machine_readable
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table, facts
from rlctl.contract.errors import Reason
from rlctl.launch.supervisor import fleet_state
from rlctl.launch.supervisor.fleet_state import FleetState, Steps, state_directory
from rlctl.runtime import private_files
from rlctl.runtime.addresses import refuse_insecure, refuse_used

if TYPE_CHECKING:
    from rlctl.cli.commands.plan_report import Prepared
    from rlctl.launch.deployment import Deployment

LOOK_S = 0.1
STOP_S = 30.0
SURVIVE_S = 70.0
"""Time for the processes of a dead supervisor to end: longer than :data:`~rlctl.runtime.server_process.ENDS_S`."""
_READY = "Ready."


@click.command(cls=TopologyCommand)
@options
@click.option("-d", "--detach", is_flag=True, help="Leave a supervisor running and return when the fleet is ready.")
@click.option(
    "--new",
    is_flag=True,
    help="Start over: put the journal of the earlier fleet of this name aside, with its versions.",
)
@click.option("--deployment", type=click.Path(path_type=Path, dir_okay=False), hidden=True, help="For the supervisor.")
@click.option("--lock", type=int, hidden=True, help="For the supervisor: descriptor of the fleet's lock.")
@click.option("--end-with-parent", is_flag=True, hidden=True, help="End when standard input ends.")
@pass_settings
def up(
    settings: Settings,
    /,
    file: Path | None,
    detach: bool,
    new: bool,
    deployment: Path | None,
    lock: int | None,
    end_with_parent: bool,
    **option_values: Any,
) -> None:
    """Start a fleet on this machine from a topology file, or from flags: a coordinator, and every engine's processes.

    In the foreground Ctrl-C takes it down; from another terminal `rlctl down` does. When the fleet is up already, a
    file is applied to it: engines are added, replaced one after another, or drained and removed; the others are not
    touched. Journal and logs are kept in XDG_STATE_HOME/rlctl/NAME. A fleet that was up before continues from
    its journal: engines serve the last published version, or nothing until a heal or an update brings that version.
    With --new the fleet starts over: it keeps the journal as journal.previous.db, and epoch and
    sequence numbers continue.
    """
    from rlctl.cli.commands.plan_report import plan_view, prepare, token, warn
    from rlctl.launch.deployment import Deployment
    from rlctl.launch.supervisor.supervisor import name_in_use, supervise
    from rlctl.transport.auth import token_variables

    if end_with_parent:
        from rlctl.runtime.server_process import end_with_parent as end

        end()
    if deployment is not None:
        desired = Deployment.of(json.loads(deployment.read_text()))
        supervise(settings, desired, lambda ready: _announce(settings, ready), lock=lock, new=new)
    prepared = prepare(file, flags(option_values))
    warn(settings, prepared.problems)
    desired = prepared.deployment
    refuse_insecure(
        desired.listen, token=token(settings, prepared.plan), insecure=desired.insecure or bool(desired.tls)
    )
    if os.environ.get("RLCTL_ACCESS_FILE") and not token(settings, prepared.plan) and not desired.tls:
        raise Reason.FIELD_REQUIRED.error(
            "RLCTL_ACCESS_FILE is set, and the fleet has no token of its own: its processes could not call each other",
            field="RLCTL_TOKEN",
            next_step="Set RLCTL_TOKEN or RLCTL_TOKEN_FILE, or use --tls.",
        )
    if prepared.running is not None and file is None:
        raise name_in_use(desired.name)
    if prepared.running is not None and new:
        raise Reason.OPERATION_CONFLICT.error(
            f"fleet {desired.name!r} is up, so it cannot be started over",
            field="--new",
            next_step=f"`rlctl down --name {desired.name}` first.",
        )
    if settings.dry_run:
        show(settings, plan_view(prepared))
        settings.say("Nothing was done.")
        return
    prepared.refuse()
    # The token of the file or the context, for the processes that are started here.
    os.environ.update(token_variables(token(settings, prepared.plan)))
    if prepared.running is not None:
        _change(settings, prepared, prepared.running)
        return
    _await_survivors(settings, desired.name)
    refuse_used(desired.listen)
    if detach:
        _detach(settings, desired, new=new)
    else:
        supervise(settings, desired, lambda ready: _announce(settings, ready), new=new)


def _await_survivors(settings: Settings, name: str) -> None:
    """Wait until the processes of a dead supervisor have ended and released journal, ports and GPUs.

    Raises OPERATION_CONFLICT for processes that do not end.
    """
    previous = fleet_state.read(name)
    if previous is None or previous.alive or not (survivors := previous.survivors):
        return
    settings.say(f"supervisor {previous.pid} has died; waiting for {', '.join(survivors)} to end")
    limit_s = min(SURVIVE_S, settings.timeout_s or SURVIVE_S)
    deadline = time.monotonic() + limit_s
    while survivors := previous.survivors:
        if time.monotonic() > deadline:
            pids = " ".join(map(str, survivors.values()))
            raise Reason.OPERATION_CONFLICT.error(
                f"processes of fleet {name!r} still run {limit_s:g} s after its supervisor died: "
                + ", ".join(f"{process} (pid {pid})" for process, pid in survivors.items()),
                next_step=f"`kill {pids}`, then the same command again.",
            )
        time.sleep(LOOK_S)


def _change(settings: Settings, prepared: Prepared, running: FleetState) -> None:
    from rlctl.cli.app.connection import interruptible
    from rlctl.cli.render import values
    from rlctl.launch.supervisor.control_socket import apply
    from rlctl.topology.diff import REMOVE, UNCHANGED, difference

    changes = [change for change in difference(prepared.plan.specs, prepared.present) if change.action != UNCHANGED]
    for change in changes:
        why = f" ({', '.join(change.fields)})" if change.fields else ""
        settings.say(f"{change.slot}: {change.action}{why}")
    removed_slots = [change.slot for change in changes if change.action == REMOVE]
    if removed_slots:
        settings.confirm(f"Drain and remove {', '.join(removed_slots)}?")

    def farewell() -> None:
        hint = f"How it stands: rlctl status, and {running.directory}/logs"
        click.echo(f"\nStopped waiting; the supervisor goes on.\n  {hint}", err=True)

    with interruptible(farewell):
        ready = apply(running, prepared.deployment, settings.say, timeout_s=settings.timeout_s)
    show(settings, _state_view(ready))
    settings.say(f"{_READY} {values.count(len(changes), 'engine')} changed.")


def _announce(settings: Settings, ready: FleetState) -> None:
    show(settings, _state_view(ready))
    settings.say(f"{_READY} Ctrl-C takes it down, and so does `rlctl down --name {ready.name}`.")


def _detach(settings: Settings, deployment: Deployment, *, new: bool) -> None:
    """Start a supervisor in a new session, and print the supervisor's lines until the fleet is ready."""
    from rlctl.launch.supervisor.supervisor import claimed

    directory = state_directory(deployment.name)
    log = directory / "logs" / "supervisor.log"
    deployment_file = directory / "deployment.json"
    # The lock is taken before files of a second fleet could be overwritten; the supervisor inherits the lock.
    with claimed(deployment.name) as lock:
        private_files.make_directory(log.parent, own=True)
        private_files.write_text(deployment_file, json.dumps(deployment.data, indent=2))
        with open(log, "w", opener=private_files.opener) as output:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "rlctl", *_as_given(settings), "up", "--deployment", str(deployment_file),
                 "--lock", str(lock), *(["--new"] if new else [])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
                pass_fds=(lock,),
            )  # fmt: skip
    printed_lines: list[str] = []
    # --timeout ends the start in the supervisor, which then takes the processes down.
    steps = Steps(deployment.name, supervisor.pid, settings.timeout_s and settings.timeout_s + SURVIVE_S)
    with log.open() as lines:

        def tell() -> None:
            for line in lines:
                if not line.startswith(_READY):
                    printed_lines.append(line.rstrip("\n"))
                    settings.say(printed_lines[-1])

        try:
            while True:
                ended = supervisor.poll() is not None
                tell()
                if ended:
                    if settings.quiet:
                        click.echo("\n".join(_failure(printed_lines)), err=True)
                    raise SystemExit(supervisor.returncode if supervisor.returncode > 0 else 1)
                ready = fleet_state.read(deployment.name)
                if ready is not None and ready.pid == supervisor.pid and ready.phase == fleet_state.READY:
                    break
                steps.refuse_stuck()
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            supervisor.terminate()
            deadline = time.monotonic() + STOP_S
            while supervisor.poll() is None and time.monotonic() < deadline:
                tell()
                time.sleep(LOOK_S)
            tell()
            raise
    show(settings, _state_view(ready))
    settings.say(f"{_READY} `rlctl down --name {ready.name}` takes it down.")


def _as_given(settings: Settings) -> list[str]:
    """Return the global options for the supervisor, as given to this command."""
    global_flags = {
        "--context": settings.flags.get("context"),
        "--output": settings.output if machine_readable(settings) else None,  # the format of an error
        "--timeout": f"{settings.timeout_s:.9f}s" if settings.timeout_s else None,
    }
    return [word for name, value in global_flags.items() if value for word in (name, value)]


def _failure(lines: Sequence[str]) -> Sequence[str]:
    """Return the error lines of a supervisor that has ended."""
    first = next((index for index, line in enumerate(lines) if line.startswith(("Error:", '{"error"'))), 0)
    return lines[first:]


def _state_view(ready: FleetState) -> View:
    about = facts(
        [
            ("Fleet", ready.name),
            ("Endpoint", ready.endpoint),
            ("Supervisor", str(ready.pid)),
            ("State", ready.directory),
            *((f"Gateway of {model}", address) for model, address in ready.gateways.items()),
            *((f"Router of {model}", address) for model, address in ready.routers.items()),
            ("Use it", f"export RLCTL_ENDPOINT={shlex.quote(ready.endpoint)}" if len(fleet_state.up()) > 1 else ""),
        ]
    )
    processes = Table(
        ("PROCESS", "PID", "STATE", "LOG"),
        [
            # Relative to the directory of "State": the terminal would wrap whole paths in the middle.
            [name, str(pid), _phase(ready, name), f"logs/{name}.log"]
            for name, pid in ready.processes.items()
        ],
    )
    return View(asdict(ready), lambda _: [about, processes], lambda: [ready.endpoint])


def _phase(ready: FleetState, process: str) -> str:
    """Return the life cycle phase of a process's engine, also for a follower; "" for a process without an engine."""
    return ready.engines.get(process) or ready.engines.get(process.rpartition(".")[0], "")
