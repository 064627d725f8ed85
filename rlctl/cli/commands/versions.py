"""``rlctl versions`` and ``rlctl rollback``: list the published versions, and publish an earlier version again."""

from __future__ import annotations

import click

from rlctl.cli.app.connection import bounded, connected
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import operations, values
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table
from rlctl.contract.enums import number
from rlctl.contract.errors import OperationFailed, Reason
from rlctl.sdk.blocking import Fleet
from rlctl.v1.common_pb2 import PauseMode
from rlctl.v1.results_pb2 import OPERATION_STATE_OK
from rlctl.v1.verbs_pb2 import UpdateOptions

_HEADERS = ("MODEL", "VERSION", "SEQ", "PUBLISHED", "SERVED", "CHECKPOINT", "DIGEST")


@click.command(cls=Command)
@click.option("--model", default="", metavar="NAME", help="Only this model.")
@pass_settings
def versions(settings: Settings, model: str) -> None:
    """List the published versions of models, the latest first, then up to 50 earlier ones.

    `rlctl rollback` publishes a version again if its checkpoint still exists.
    """
    with bounded(settings) as fleet:
        status = fleet.status(model)
        versions_by_model = {each.name: fleet.versions(each.name) for each in status.models}
    serving = {
        (stage.registration.model, stage.report.weight_version.sequence) for stage in status.stages if stage.routable
    }
    rows = [
        [
            name,
            each.version.label,
            str(each.version.sequence),
            values.moment(each.publish_time),
            values.yes((name, each.version.sequence) in serving),
            each.checkpoint,
            each.model_digest,
        ]
        for name, published in versions_by_model.items()
        for each in published
    ]
    all_versions = [each for published in versions_by_model.values() for each in published]
    show(settings, View(all_versions, lambda _: [Table(_HEADERS, rows)], lambda: [row[1] for row in rows]))


@click.command(cls=Command)
@click.argument("version", default="", metavar="[VERSION]")
@click.option(
    "--model", default="", metavar="NAME", help="Model to roll back.  [default: the only one that is updatable]"
)
@click.option(
    "--pause",
    default="retract",
    show_default=True,
    type=click.Choice(["abort", "retract", "in_place", "drain"]),
    help="Treatment of the running requests.",
)
@pass_settings
def rollback(settings: Settings, version: str, model: str, pause: str) -> None:
    """Publish an earlier version of a model again, from its checkpoint.

    VERSION is LABEL, LABEL#SEQUENCE or #SEQUENCE; without it, the version before the latest. It gets a new sequence
    under its old label. If the version has a digest on record, the weights must have that digest; else the update
    fails. Files of a version without a digest are read as they are now. A trainer's version has no checkpoint: only
    the trainer can send it again.
    """
    settings.mutating = not settings.dry_run
    options = UpdateOptions(pause=number(PauseMode.DESCRIPTOR, pause, "pause"))  # type: ignore[arg-type]
    with connected(settings) as fleet:
        model = model or _only(fleet)
        if not settings.dry_run:
            settings.confirm(f"Publish {version or 'the version before the latest'} of {model} again?")
        operation = fleet.rollback(
            model,
            version,
            options=options,
            timeout_s=settings.timeout_s,
            validate_only=settings.dry_run,
            check=False,
        )
    show(settings, operations.view(operation))
    if operation.state != OPERATION_STATE_OK:
        raise OperationFailed(operation)
    settings.say(operations.summary(operation))


def _only(fleet: Fleet) -> str:
    """Return the only model that can be updated. Raises FIELD_REQUIRED."""
    names = [model.name for model in fleet.status().models if model.updatable]
    if len(names) != 1:
        raise Reason.FIELD_REQUIRED.error(
            f"--model is required; models that can be updated: {', '.join(names) or 'none'}", field="model"
        )
    return names[0]
