"""``rlctl up``: a fleet of local processes, in the foreground or under a supervisor of its own."""

from __future__ import annotations

import errno
import os
import shlex
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from rlctl.cli import state
from rlctl.cli.options import Command, pass_settings
from rlctl.cli.output import View, show
from rlctl.cli.settings import ENDPOINT, Settings
from rlctl.cli.state import FleetState, state_directory
from rlctl.cli.supervisor import Plan, supervise, taken
from rlctl.cli.tables import Table, facts
from rlctl.cli.types import pairs
from rlctl.errors import Reason
from rlctl.transport.addresses import refuse_insecure, split

LOOK_S = 0.1
STOP_S = 30.0
_READY = "Ready."


@click.command(cls=Command)
@click.option(
    "--hf-checkpoint",
    "checkpoint",
    required=True,
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    metavar="DIR",
    help="Checkpoint that every engine loads.",
)
@click.option(
    "--rollout-num-gpus", "ranks", default=1, show_default=True, type=click.IntRange(1), help="Ranks of all engines."
)
@click.option(
    "--rollout-num-gpus-per-engine",
    "tp_size",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Tensor-parallel ranks of each engine.",
)
@click.option("--engine", default="torch", show_default=True, help="Engine plug-in.")
@click.option("--model", default="actor", show_default=True, help="Model that the engines serve.")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    type=click.Choice(["cpu", "cuda"]),
    help="What the ranks compute on; cuda: one GPU each.",
)
@click.option("--listen", default=ENDPOINT, show_default=True, metavar="ADDRESS", help="Where the coordinator listens.")
@click.option("--name", default="default", show_default=True, help="Name of the fleet on this machine.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Setting of the plug-in.  [repeatable]")
@click.option("--insecure", is_flag=True, help="Bind where other hosts can reach it though there is no token.")
@click.option("-d", "--detach", is_flag=True, help="Leave a supervisor running and return when the fleet is ready.")
@pass_settings
def up(
    settings: Settings,
    checkpoint: str,
    ranks: int,
    tp_size: int,
    engine: str,
    model: str,
    device: str,
    listen: str,
    name: str,
    options: tuple[str, ...],
    insecure: bool,
    detach: bool,
) -> None:
    """Start a fleet on this machine: a coordinator, and the processes of every engine.

    In the foreground Ctrl-C takes it down; from another terminal `rlctl down` does. Journal and logs are kept in
    XDG_STATE_HOME/rlctl/NAME; every start is a new fleet, the journal of the one before stays as journal.previous.db.
    """
    engines = ranks // tp_size
    if ranks % tp_size:
        raise click.UsageError(
            f"--rollout-num-gpus {ranks} is not divisible by --rollout-num-gpus-per-engine {tp_size}: "
            f"{engines} {'engine leaves' if engines == 1 else 'engines leave'} {ranks % tp_size} over"
        )
    directory = state_directory(name)
    plan = Plan(name, directory, checkpoint, model, engine, engines, tp_size, listen, device, pairs(options), insecure)
    refuse_insecure(listen, token=settings.token, insecure=insecure)
    if (running := state.read(name)) is not None and running.alive:
        raise taken(name)
    _refuse_used_port(listen)
    if settings.dry_run:
        show(settings, _plan_view(plan))
        settings.say("Nothing was done.")
    elif detach:
        _detach(settings, plan)
    else:
        supervise(settings, plan, lambda ready: _announce(settings, ready))


def _announce(settings: Settings, ready: FleetState) -> None:
    show(settings, _state_view(ready))
    settings.say(f"{_READY} Ctrl-C takes it down, and so does `rlctl down --name {ready.name}`.")


def _detach(settings: Settings, plan: Plan) -> None:
    """Start a supervisor in a session of its own, tell what it tells until the fleet is ready."""
    log = plan.directory / "logs" / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **({"RLCTL_TOKEN": settings.token} if settings.token else {})}
    with log.open("w") as output, log.open() as lines:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "rlctl", *_arguments(settings, plan)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            env=environment,
            start_new_session=True,
        )

        def tell() -> None:
            for line in lines:
                if not line.startswith(_READY):
                    settings.say(line.rstrip("\n"))

        try:
            while True:
                ended = supervisor.poll() is not None
                tell()
                if ended:
                    raise SystemExit(supervisor.returncode if supervisor.returncode > 0 else 1)
                ready = state.read(plan.name)
                if ready is not None and ready.pid == supervisor.pid and ready.phase == state.READY:
                    break
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


def _arguments(settings: Settings, plan: Plan) -> list[str]:
    """The command line of the supervisor: the same fleet in the foreground."""
    arguments = ["--timeout", f"{settings.timeout_s}s"] if settings.timeout_s else []
    arguments += ["up", "--hf-checkpoint", plan.checkpoint, "--engine", plan.engine, "--model", plan.model]
    arguments += ["--rollout-num-gpus", str(plan.engines * plan.tp_size)]
    arguments += ["--rollout-num-gpus-per-engine", str(plan.tp_size)]
    arguments += ["--device", plan.device, "--listen", plan.listen, "--name", plan.name]
    for key, value in plan.options.items():
        arguments += ["--option", f"{key}={value}"]
    return [*arguments, "--insecure"] if plan.insecure else arguments


def _refuse_used_port(listen: str) -> None:
    """Raise FIELD_INVALID when another process listens there already."""
    if listen.startswith("unix:"):
        return
    host, port = split(listen, "listen")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            used = error.errno == errno.EADDRINUSE
            raise Reason.FIELD_INVALID.error(
                f"{listen} is in use by another process" if used else f"{listen} cannot be bound: {error.strerror}",
                field="listen",
                next_step="Choose another --listen; port 0 takes any that is free." if used else "",
            ) from None


def _state_view(ready: FleetState) -> View:
    logs = Path(ready.directory) / "logs"
    about = facts(
        [
            ("Fleet", ready.name),
            ("Endpoint", ready.endpoint),
            ("Supervisor", str(ready.pid)),
            ("State", ready.directory),
            ("Use it", "" if ready.endpoint == ENDPOINT else f"export RLCTL_ENDPOINT={shlex.quote(ready.endpoint)}"),
        ]
    )
    processes = Table(
        ("PROCESS", "PID", "LOG"),
        [[name, str(pid), str(logs / f"{name}.log")] for name, pid in ready.processes.items()],
    )
    return View(asdict(ready), lambda _: [about, processes], lambda: [ready.endpoint])


def _plan_view(plan: Plan) -> View:
    data = {**asdict(plan), "directory": str(plan.directory), "slots": plan.slots}
    about = facts(
        [
            ("Fleet", plan.name),
            ("Coordinator", plan.listen),
            ("State", str(plan.directory)),
            ("Options", " ".join(f"{key}={value}" for key, value in plan.options.items())),
        ]
    )
    rows = [[slot, plan.model, plan.engine, str(plan.tp_size), plan.checkpoint] for slot in plan.slots]
    engines = Table(("SLOT", "MODEL", "ENGINE", "TP", "CHECKPOINT"), rows)
    return View(data, lambda _: [about, engines], lambda: plan.slots)
