"""``rlctl drain``: take stages out of routing, and wait until all are idle."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import connected, interruptible
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import stages
from rlctl.cli.render.printer import show

DRAIN_S = 300.0


@click.command(cls=Command)
@click.argument("slots", nargs=-1, required=True, metavar="SLOT...")
@click.option("--for", "reason", default="", metavar="REASON", help="Reason; shown until the stages are enabled again.")
@click.option("--force", is_flag=True, help="Also if fewer stages than min_healthy remain routable.")
@pass_settings
def drain(settings: Settings, slots: tuple[str, ...], reason: str, force: bool) -> None:
    """Disable stages, and wait until they are idle.

    Running requests end by themselves; none is aborted. A stage is busy while an update of its model is open. A stage
    without a link is idle once its serving lease has ended. The command fails with exit code 6 after --timeout, by
    default 5 minutes; the stages stay disabled. `rlctl enable` lets them serve again. A drain that would leave fewer
    stages of a model routable than its min_healthy is refused.
    """
    settings.mutating = not settings.dry_run
    reasons: dict[str, str] = {}

    def report(busy: dict[str, str]) -> None:
        for slot, why in busy.items():
            if reasons.get(slot) != why:
                settings.say(f"{slot}: {why}")
        reasons.update(busy)

    def farewell() -> None:
        click.echo(
            f"\nStopped waiting; disabled: {', '.join(slots)}. `rlctl enable {' '.join(slots)}` ends that.", err=True
        )

    with connected(settings) as fleet:
        if settings.dry_run:
            status = fleet.set_enabled(slots, False, force=force, validate_only=True)
        else:
            with interruptible(farewell):
                timeout_s = settings.timeout_s or DRAIN_S
                status = fleet.drain(slots, reason=reason, force=force, timeout_s=timeout_s, on_busy=report)
    show(settings, stages.view_of(status, slots))
    if settings.dry_run:
        settings.say(f"Nothing was done; {', '.join(slots)} would be drained.")
    else:
        pronoun = "it" if len(slots) == 1 else "them"
        settings.say(
            f"Nothing runs on {', '.join(slots)}. `rlctl enable {' '.join(slots)}` lets {pronoun} serve again."
        )
