"""``rlctl describe``: all facts about a stage, model or operation."""

from __future__ import annotations

from pathlib import Path

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.commands.get import whole_id
from rlctl.cli.render import operations, timeline, values
from rlctl.cli.render import stages as roster
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table, facts
from rlctl.contract.errors import Reason
from rlctl.v1.results_pb2 import Operation, OperationState


@click.command("stage", cls=Command)
@click.argument("slot")
@pass_settings
def describe_stage(settings: Settings, slot: str) -> None:
    """Show everything about a stage: state, ranks, capabilities."""
    with bounded(settings) as fleet:
        stages = fleet.status().stages
    for stage in stages:
        if stage.registration.slot == slot:
            show(settings, roster.stage_view(stage))
            return
    slots = ", ".join(stage.registration.slot for stage in stages) or "none"
    raise Reason.STAGE_NOT_FOUND.error(f"no stage fills slot {slot!r}; there are: {slots}", field="slot")


@click.command("model", cls=Command)
@click.argument("name")
@pass_settings
def describe_model(settings: Settings, name: str) -> None:
    """Show everything about a model: versions, checkpoint, open update, stages."""
    with bounded(settings) as fleet:
        status = fleet.status(name)
    show(settings, roster.model_view(status.models[0], status.stages))


@click.command("operation", cls=Command)
@click.argument("operation_id", metavar="ID")
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the timeline of a weight update or a heal to a page without outside resources.",
)
@pass_settings
def describe_operation(settings: Settings, operation_id: str, page: Path | None) -> None:
    """Show everything about an operation: times, version, timeline, and the result of every rank."""
    with bounded(settings) as fleet:
        operation = fleet.operation(whole_id(fleet, operation_id))
    if page is not None:
        _write_page(operation, page)
        return
    show(settings, View(operation, lambda _: _tables(operation), lambda: [operation.operation_id], whole_ids=True))


def _write_page(operation: Operation, path: Path) -> None:
    if not operation.timeline.phases:
        raise Reason.UNSUPPORTED.error(
            f"{operation.verb} {operation.operation_id} has no timeline: it is no weight update and no heal, "
            "it has just begun, or an earlier version of rlctl recorded it"
        )
    try:
        path.write_text(timeline.page(operation))
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint="--html") from None
    click.echo(path)


def _tables(operation: Operation) -> list[Table]:
    return [
        facts(
            [
                ("Operation", operation.operation_id),
                ("Verb", operation.verb),
                ("Adapter", operation.adapter),
                ("State", values.name_of(OperationState.DESCRIPTOR, operation.state)),
                ("Error", values.error(operation.error)),
                ("Next step", operation.error.next_step),
                ("Model", operation.model),
                ("Update", operation.update_id),
                ("Version", values.version(operation.weight_version)),
                ("Model digest", operation.model_digest),
                ("Verified", values.verification(operation.verification)),
                ("Adapters", values.adapters(operation.adapters)),
                ("Adapters dropped", ", ".join(operation.dropped_adapters)),
                ("Paused", values.duration(operation.pause_time) if operation.HasField("pause_time") else ""),
                ("Accepted", values.moment(operation.create_time)),
                ("Ended", values.moment(operation.done_time)),
                ("Principal", values.principal(operation.caller)),
                ("Client", values.client(operation.caller)),
                ("Targets", ", ".join(operation.targets)),
                ("Left out", ", ".join(f"{stage.slot} ({stage.reason})" for stage in operation.excluded)),
            ]
        ),
        *([timeline.table(operation)] if operation.timeline.phases else []),
        *operations.view(operation).tables(True),
    ]
