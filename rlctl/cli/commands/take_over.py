"""``rlctl take-over``: stages that obey the coordinator of a different fleet."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import stages
from rlctl.cli.render.printer import show


@click.command("take-over", cls=Command)
@click.argument("slots", nargs=-1, required=True, metavar="SLOT...")
@pass_settings
def take_over(settings: Settings, slots: tuple[str, ...]) -> None:
    """Take charge of stages that obey another coordinator.

    The epoch of this fleet becomes higher than the epoch that these stages obey. Their former coordinator is fenced.
    """
    settings.mutating = not settings.dry_run
    if not settings.dry_run:
        _ = settings.endpoint  # chosen before the question about that fleet
        settings.announce_fleet()
        settings.confirm(f"Another coordinator that holds {', '.join(slots)} loses them. Go on?", unasked=False)
    with bounded(settings) as fleet:
        status = fleet.take_over(slots, validate_only=settings.dry_run)
    show(settings, stages.view_of(status, slots))
    if settings.dry_run:
        settings.say(f"Nothing was done; {', '.join(slots)} would be taken over.")
