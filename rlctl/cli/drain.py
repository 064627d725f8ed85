"""``rlctl drain``: take stages out of routing, and wait until nothing runs on them."""

from __future__ import annotations

import click

from rlctl.cli import roster
from rlctl.cli.options import Command, pass_settings
from rlctl.cli.output import show
from rlctl.cli.session import connected, interruptible
from rlctl.cli.settings import Settings

DRAIN_S = 300.0


@click.command(cls=Command)
@click.argument("slots", nargs=-1, required=True, metavar="SLOT...")
@click.option("--for", "reason", default="", metavar="REASON", help="Why; shown until the stages are enabled again.")
@pass_settings
def drain(settings: Settings, slots: tuple[str, ...], reason: str) -> None:
    """Disable stages, and wait until nothing runs on them.

    Requests that run end by themselves; none is aborted. An open update of the model is waited for, too. Exit code 6
    when the time is up, 5 minutes unless --timeout says otherwise: the stages stay disabled all the same. `rlctl
    enable` lets them serve again.
    """
    settings.mutating = not settings.dry_run
    said: dict[str, str] = {}

    def tell(busy: dict[str, str]) -> None:
        for slot, why in busy.items():
            if said.get(slot) != why:
                settings.say(f"{slot}: {why}")
        said.update(busy)

    def farewell() -> None:
        click.echo(f"\nStopped waiting; {', '.join(slots)} stay disabled. `rlctl enable` ends that.", err=True)

    with connected(settings) as fleet:
        if settings.dry_run:
            after = fleet.set_enabled(slots, False, validate_only=True)
        else:
            with interruptible(farewell):
                after = fleet.drain(slots, reason=reason, timeout_s=settings.timeout_s or DRAIN_S, tell=tell)
    show(settings, roster.stages_view([stage for stage in after.stages if stage.registration.slot in slots]))
    if settings.dry_run:
        settings.say(f"Nothing was done; {', '.join(slots)} would be drained.")
    else:
        settings.say(f"Nothing runs on {', '.join(slots)}. `rlctl enable` lets them serve again.")
