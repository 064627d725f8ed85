"""``rlctl weights``: commands on weights that are not in the verb table."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import operations
from rlctl.cli.render.printer import show
from rlctl.contract.errors import Reason


@click.command("abort", cls=Command)
@click.option("--model", default="", metavar="NAME", help="Model whose update is open.  [default: the only one]")
@click.option("--reason", default="aborted by an operator", show_default=True, help="Reason, kept with the operation.")
@pass_settings
def weights_abort(settings: Settings, model: str, reason: str) -> None:
    """Abort the open weight update of a model, also the update of a trainer that is still alive.

    No version is published. Targets with served weights that may be partly written are DIRTY afterwards. Other
    targets are unchanged.
    """
    with bounded(settings) as fleet:
        opened = {each.name: each.update_id for each in fleet.status(model).models if each.update_id}
        if not opened:
            raise Reason.UPDATE_NOT_FOUND.error(
                f"no update of {model or 'any model'} is open", next_step="`rlctl get models` shows open updates."
            )
        if len(opened) > 1:
            raise Reason.FIELD_REQUIRED.error(
                f"updates of {', '.join(sorted(opened))} are open; choose a model with --model", field="model"
            )
        ((name, update_id),) = opened.items()
        if settings.dry_run:
            operation = fleet.operation(update_id)
        else:
            settings.announce_fleet()
            settings.confirm(f"Abort update {update_id} of {name}?")
            settings.mutating = True
            operation = fleet.abort_update(update_id, reason=reason)
    show(settings, operations.view(operation))
    settings.say(operations.summary(operation))
