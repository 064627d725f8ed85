"""``rlctl min-healthy``: the number of stages that voluntary disruptions leave routable."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import stages
from rlctl.cli.render.printer import View, show
from rlctl.v1.fleet_pb2 import Fleet


@click.command("min-healthy", cls=Command)
@click.argument("limit", required=False, metavar="[LIMIT]")
@click.option("--model", default="", metavar="NAME", help="Model.  [default: the only one]")
@pass_settings
def min_healthy(settings: Settings, limit: str | None, model: str) -> None:
    """Show or set how many stages of a model must stay routable: a number, or a share such as 50%; 0 for no limit.

    `drain`, `disable`, `restart`, the replacements and removals of `up`, and rolling updates keep to the limit. A loss
    or a pause is not refused. The limit is in the journal. In a fleet of `up`, the topology sets it again when the
    supervisor starts on an existing journal, and when the value in the file changes.
    """
    settings.mutating = limit is not None and not settings.dry_run
    with bounded(settings) as fleet:
        status = fleet.status(model)
        if limit is not None:
            name = stages.only_model(status)
            status = fleet.set_min_healthy(name, limit, validate_only=settings.dry_run)
            status = Fleet(
                models=[each for each in status.models if each.name == name],
                stages=[each for each in status.stages if each.registration.model == name],
            )
    show(
        settings,
        View(
            list(status.models), lambda _: [stages.limits_table(status)], lambda: [each.name for each in status.models]
        ),
    )
    if limit is not None and settings.dry_run:
        settings.say(f"Nothing was done; min_healthy of {name} would be {limit}.")
