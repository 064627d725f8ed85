"""``rlctl restart``: drain and start again engines that ``rlctl up`` started."""

from __future__ import annotations

from dataclasses import asdict

import click

from rlctl.cli.app.connection import interruptible
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.local_fleets import listed
from rlctl.cli.app.settings import Settings
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table
from rlctl.contract.errors import Reason
from rlctl.launch.deployment import Deployment
from rlctl.launch.supervisor import fleet_state


@click.command(cls=Command)
@click.argument("slots", nargs=-1, required=True, metavar="SLOT...")
@click.option("--name", help="Name of the fleet.  [default: the only fleet that is up, else default]")
@click.option("--force", is_flag=True, help="Also if fewer stages than min_healthy remain routable.")
@pass_settings
def restart(settings: Settings, slots: tuple[str, ...], name: str | None, force: bool) -> None:
    """Drain engines of a fleet on this machine, and start them again, one engine of a model at a time.

    An engine is healed to the published version after its start. A failed engine is started without a drain. A disabled
    stage stays disabled. Ctrl-C ends the wait only: the supervisor goes on. If the model has min_healthy, the drain of
    an engine waits until enough other engines are routable. A restart that could never begin is refused.
    """
    from rlctl.launch.supervisor.control_socket import apply

    name = settings.fleet_name(name)
    running = fleet_state.read(name)
    if running is None or not running.alive:
        raise click.BadParameter(
            f"no fleet {name!r} is up on this machine; fleets that are up: {listed(fleet_state.up())}",
            param_hint="--name",
        )
    if not running.deployment:
        raise Reason.OPERATION_CONFLICT.error(f"fleet {name!r} is still starting")
    deployment = Deployment.of(running.deployment)
    engine_slots = [spec.slot for spec in deployment.engines]
    for slot in slots:
        if slot not in engine_slots:
            raise Reason.STAGE_NOT_FOUND.error(
                f"fleet {name!r} has no engine {slot!r}; there are: {', '.join(engine_slots) or 'none'}", field="slot"
            )
    if settings.dry_run:
        settings.say(f"Nothing was done; {', '.join(slots)} would be drained and started again.")
        return
    settings.announce_fleet()
    settings.confirm(f"Drain and start again {', '.join(slots)}?")

    def farewell() -> None:
        click.echo(f"\nStopped waiting; the supervisor goes on.\n  Progress: rlctl status, and "
                   f"{running.directory}/logs", err=True)  # fmt: skip

    with interruptible(farewell):
        ready = apply(running, deployment, settings.say, restart=slots, force=force, timeout_s=settings.timeout_s)
    rows = [[slot, str(ready.processes.get(slot, "")), ready.engines.get(slot, "")] for slot in slots]
    show(settings, View(asdict(ready), lambda _: [Table(("SLOT", "PID", "STATE"), rows)], lambda: list(slots)))
    settings.say("Started again.")
    settings.announce_fleet(done=True)
