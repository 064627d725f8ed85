"""``rlctl get``: stages, models, operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.app.types import ParamType
from rlctl.cli.render import operations as results
from rlctl.cli.render import stages
from rlctl.cli.render.printer import View, show
from rlctl.contract.errors import Reason
from rlctl.contract.verbs import VERBS

if TYPE_CHECKING:
    from rlctl.sdk.blocking import Fleet

OPERATION_VERBS = (
    *(verb.name for verb in VERBS.values() if verb.fleet and (verb.mutating or verb.reads_if)),
    "WeightUpdate",
)
"""Verbs with recorded operations; WeightUpdate is a trainer's."""

STATES = ("running", "ok", "partial", "failed", "unknown", "cancelled")

_ID_LENGTH, _END_LENGTH = 36, 4

_model = click.option("--model", default="", metavar="NAME", help="Only this model.")


@click.command("stages", cls=Command)
@_model
@pass_settings
def get_stages(settings: Settings, model: str) -> None:
    """List the stages."""
    with bounded(settings) as fleet:
        show(settings, stages.stages_view(fleet.status(model).stages))


@click.command("models", cls=Command)
@_model
@pass_settings
def get_models(settings: Settings, model: str) -> None:
    """List the models."""
    with bounded(settings) as fleet:
        show(settings, stages.models_view(fleet.status(model)))


class VerbType(ParamType):
    """A verb of operations, in any case."""

    name = "verb"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        verbs = {verb.lower(): verb for verb in OPERATION_VERBS}
        if str(value).lower() not in verbs:
            self.fail(f"{value!r} is no verb; there are: {', '.join(OPERATION_VERBS)}", param, ctx)
        return verbs[str(value).lower()]


def _list_operations(settings: Settings, verb: str | None, state: str | None, limit: int) -> None:
    with bounded(settings) as fleet:
        listed = fleet.operations(verb=verb or "", state=state or "", page_size=limit)
        ids = [operation.operation_id for operation in listed]
        show(settings, View(list(listed), lambda wide: [results.listing(listed, wide)], lambda: ids))


def _operations(name: str) -> click.Command:
    """Return the command that lists operations, under the given name."""
    return Command(
        name,
        params=[
            click.Option(["--verb"], type=VerbType(), metavar="NAME", help="Only this verb, PauseGeneration say."),
            click.Option(["--state"], type=click.Choice(STATES), help="Only operations in this state."),
            click.Option(["--limit"], type=click.IntRange(1, 1000), default=50, show_default=True, help="At most."),
        ],
        callback=pass_settings(_list_operations),
        help="List operations, newest first.",
    )


get_operations = _operations("operations")
operations = _operations("operations")


@click.command("operation", cls=Command)
@click.argument("operation_id", metavar="ID")
@pass_settings
def get_operation(settings: Settings, operation_id: str) -> None:
    """Show one operation as its verb printed it. Its id is the request_id of the call that made it.

    The last characters of an id are enough if no other id ends with them.
    """
    with bounded(settings) as fleet:
        operation = fleet.operation(whole_id(fleet, operation_id))
    show(settings, results.view(operation))
    settings.say(results.summary(operation))


def whole_id(fleet: Fleet, written: str) -> str:
    """Return the whole id of an operation: a list on a terminal shows only the end. Raises FIELD_INVALID if ambiguous.

    A text that is no operation's end is returned unchanged: the coordinator reports the error.
    """
    end = written.removeprefix("…")
    if len(end) == _ID_LENGTH or len(end) < _END_LENGTH:
        return written
    ids = [each.operation_id for each in fleet.operations(page_size=1000) if each.operation_id.endswith(end)]
    if len(ids) > 1:
        raise Reason.FIELD_INVALID.error(
            f"{len(ids)} operations end in {end!r}: {', '.join(ids)}", field="operation_id"
        )
    return ids[0] if ids else written
