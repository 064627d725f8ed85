"""``rlctl cancel``: cancel an operation."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.commands.get import whole_id
from rlctl.cli.render import operations
from rlctl.cli.render.printer import show


@click.command(cls=Command)
@click.argument("operation_id", metavar="ID")
@pass_settings
def cancel(settings: Settings, operation_id: str) -> None:
    """Drop the commands of an operation that have not started.

    Running commands complete. A weight update is aborted. Prints the operation as it ended.
    """
    with bounded(settings) as fleet:
        operation_id = whole_id(fleet, operation_id)
        if settings.dry_run:
            operation = fleet.operation(operation_id)
        else:
            settings.mutating = True
            settings.announce_fleet()
            operation = fleet.cancel_operation(operation_id)
    show(settings, operations.view(operation))
    settings.say(operations.summary(operation))
