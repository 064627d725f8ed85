"""``rlctl top``: rates and queues, live."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING

import click

from rlctl.cli.app.following import follow, watching
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.app.types import DURATION
from rlctl.cli.render.live import show_live
from rlctl.cli.render.loads import Sample, summed, top_view
from rlctl.cli.render.printer import View
from rlctl.v1.fleet_pb2 import Fleet as FleetMessage
from rlctl.v1.verbs_pb2 import GetLoadsRequest

if TYPE_CHECKING:
    from rlctl.sdk.blocking import Fleet


@click.command(cls=Command)
@click.option("--model", default="", metavar="NAME", help="Only this model.")
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="Time between two samples.")
@click.option("-n", "--samples", type=click.IntRange(1), help="Samples to show.  [default: until Ctrl-C, or --timeout]")
@pass_settings
def top(settings: Settings, model: str, interval: float, samples: int | None) -> None:
    """Show what runs and waits at each stage, tokens and steps per second, and running operations.

    A rate needs two samples, so the first line comes after --interval. A terminal shows the rates live; elsewhere each
    sample is printed. KV is the used part of the KV cache. A stage that does not answer in time shows no numbers.
    """

    def views(fleet: Fleet) -> Generator[View, None, None]:
        before = _sample(fleet, model, interval)
        while True:
            time.sleep(interval)
            now = _sample(fleet, model, interval)
            yield top_view(settings.endpoint, before, now)
            before = now

    def counted(views: Generator[View, None, None]) -> Generator[View, None, None]:
        for number, view in enumerate(views, 1):
            yield view
            if number == samples:
                return

    with watching(settings) as displayed:
        changes = follow(settings, views, lambda error: settings.say(f"{error.message}; trying again"))
        show_live(settings, counted(changes), displayed)


def _sample(fleet: Fleet, model: str, limit_s: float) -> Sample:
    status: FleetMessage = fleet.status(model)
    loads = {}
    if status.stages:
        loads = summed(fleet.call(GetLoadsRequest(), model=model, timeout_s=max(1.0, limit_s), check=False))
    running = [each for each in fleet.operations(state="running") if model in ("", each.model)]
    return Sample(time.monotonic(), status, loads, running)
