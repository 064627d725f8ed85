"""``rlctl status``: the fleet at a glance, once or live."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.following import follow, watching
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import stages
from rlctl.cli.render.live import show_live
from rlctl.cli.render.printer import View, show

if TYPE_CHECKING:
    from rlctl.sdk.blocking import Fleet


@click.command(cls=Command)
@click.option("--model", default="", metavar="NAME", help="Only this model.")
@click.option("-w", "--watch", is_flag=True, help="Follow it until Ctrl-C, or for --timeout.")
@pass_settings
def status(settings: Settings, model: str, watch: bool) -> None:
    """Show models and stages.

    With -w, a terminal shows changes live. Elsewhere models and stages are printed again after every change, with
    -o jsonl in one line.
    """

    def views(fleet: Fleet) -> Generator[View, None, None]:
        with contextlib.closing(fleet.watch(model)) as events:
            for _ in events:
                yield stages.fleet_view(fleet.status(model), settings.endpoint)

    if watch:
        with watching(settings) as displayed:
            changes = follow(settings, views, lambda error: settings.say(f"{error.message}; trying again"))
            show_live(settings, changes, displayed)
        return
    with bounded(settings) as fleet:
        show(settings, stages.fleet_view(fleet.status(model), settings.endpoint))
