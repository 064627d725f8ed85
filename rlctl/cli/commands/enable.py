"""``rlctl enable`` and ``rlctl disable``: the operator's mark on stages."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import stages
from rlctl.cli.render.printer import show


@click.command(cls=Command)
@click.argument("slots", nargs=-1, required=True, metavar="SLOT...")
@pass_settings
def enable(settings: Settings, slots: tuple[str, ...]) -> None:
    """Route requests to disabled stages again."""
    _set(settings, slots, True)


@click.command(cls=Command)
@click.argument("slots", nargs=-1, required=True, metavar="SLOT...")
@click.option("--force", is_flag=True, help="Also if fewer stages than min_healthy remain routable.")
@pass_settings
def disable(settings: Settings, slots: tuple[str, ...], force: bool) -> None:
    """Route no requests to stages. Disabled stages remain targets of every verb, also of weight updates.

    A change that would leave fewer stages of a model routable than its min_healthy is refused.
    """
    _set(settings, slots, False, force=force)


def _set(settings: Settings, slots: tuple[str, ...], enabled: bool, *, force: bool = False) -> None:
    settings.mutating = not settings.dry_run
    with bounded(settings) as fleet:
        status = fleet.set_enabled(slots, enabled, force=force, validate_only=settings.dry_run)
    show(settings, stages.view_of(status, slots))
    if settings.dry_run:
        settings.say(f"Nothing was done; {', '.join(slots)} would be {'enabled' if enabled else 'disabled'}.")
