"""``rlctl heal``: bring stages to the published version without the trainer."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import operations
from rlctl.cli.render.printer import show
from rlctl.contract.errors import OperationFailed
from rlctl.v1.results_pb2 import OPERATION_STATE_OK


@click.command(cls=Command)
@click.argument("slots", nargs=-1, metavar="[SLOT...]")
@click.option(
    "--checkpoint",
    default="",
    metavar="DIR",
    help="Read this checkpoint, as the engines see it.  [default: the version's own]",
)
@pass_settings
def heal(settings: Settings, slots: tuple[str, ...], checkpoint: str) -> None:
    """Bring stages to the published version without the trainer.

    Without names: every stage that is STALE, DIRTY or quarantined, or lacks an adapter. A stage serves again only
    after its weights have the published digest.
    """
    settings.mutating = not settings.dry_run
    with bounded(settings) as fleet:
        operation = fleet.heal(
            slots, checkpoint=checkpoint, timeout_s=settings.timeout_s, validate_only=settings.dry_run, check=False
        )
    show(settings, operations.view(operation))
    if operation.state != OPERATION_STATE_OK:
        raise OperationFailed(operation)
    settings.say(operations.summary(operation))
