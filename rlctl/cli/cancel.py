"""``rlctl cancel``: give up an operation."""

from __future__ import annotations

import click

from rlctl.cli import results
from rlctl.cli.get import whole_id
from rlctl.cli.options import Command, pass_settings
from rlctl.cli.output import show
from rlctl.cli.session import bounded
from rlctl.cli.settings import Settings


@click.command(cls=Command)
@click.argument("operation_id", metavar="ID")
@pass_settings
def cancel(settings: Settings, operation_id: str) -> None:
    """Give up an operation that has had no effect yet.

    Targets that have not started do not; the others end as they would have. Prints the operation as it ended.
    """
    with bounded(settings) as fleet:
        operation_id = whole_id(fleet, operation_id)
        if settings.dry_run:
            operation = fleet.operation(operation_id)
        else:
            settings.mutating = True
            operation = fleet.cancel_operation(operation_id)
    show(settings, results.view(operation))
    settings.say(results.summary(operation))
