"""``rlctl admit``: admit slots beyond the topology."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import facts


@click.command("admit", cls=Command)
@click.argument("slots", nargs=-1, required=True, metavar="SLOT...")
@click.option("--no-more", is_flag=True, help="Dismiss these slots: new stages are refused, present ones may stay.")
@pass_settings
def admit(settings: Settings, slots: tuple[str, ...], no_more: bool) -> None:
    """Admit slots that are not in the topology.

    A fleet that `rlctl up` started refuses stages of other slots, since a stage that joins gets prompts.
    """
    settings.mutating = not settings.dry_run
    admitted, dismissed = ((), slots) if no_more else (slots, ())
    with bounded(settings) as fleet:
        answer = fleet.admit(admitted, dismissed, validate_only=settings.dry_run)
    admissible = "every slot" if answer.every else ", ".join(answer.slots)
    show(settings, View(answer, lambda _: [facts([("Admitted slots", admissible)])], lambda: list(answer.slots)))
    if settings.dry_run:
        settings.say(f"Nothing was done; {', '.join(slots)} would be {'refused' if no_more else 'admitted'}.")
