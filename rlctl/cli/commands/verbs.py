"""Commands of the verb table: a row and the descriptor of the request define a command completely."""

from __future__ import annotations

import getpass
import os
import socket
from typing import Any

import click

from rlctl.cli.app import message_options
from rlctl.cli.app.connection import connected, interruptible
from rlctl.cli.app.global_options import Command, global_options
from rlctl.cli.app.message_options import Field
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import operations
from rlctl.cli.render.errors import machine_readable
from rlctl.cli.render.printer import show
from rlctl.cli.render.progress import progress
from rlctl.contract import comments
from rlctl.contract.digests import as_verified
from rlctl.contract.errors import OperationFailed, Reason, RlctlError
from rlctl.contract.validation import check
from rlctl.contract.verbs import Verb
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_RUNNING
from rlctl.v1.verbs_pb2 import CheckWeightsRequest, PauseGenerationRequest

SERVICES = ("CoordinatorService", "StageService")
"""Services with the comment of a verb: the coordinator's, or the stage's for the steps of an update."""


class VerbCommand(Command):
    """The command of a verb. The help is the RPC's comment."""

    def __init__(self, verb: Verb) -> None:
        self.verb = verb
        self.text, self.answers = about(verb)
        params = targeting()
        reserved_flags = {name for param in (*params, *global_options()) for name in param.opts} | {"--help"}
        self.fields = message_options.fields_of(verb.request.DESCRIPTOR, reserved_flags)
        super().__init__(
            verb.cli.split()[-1],
            params=[*map(message_options.option, self.fields), *params],
            callback=self._run,
            help=self.text,
            short_help=self.text,
        )

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the comment: the effect, then the answers."""
        del ctx
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(self.text)
        with formatter.section(f"Contract of {self.verb.name}"):
            formatter.write_dl(list(self.answers.items()))

    def _run(self, **values: Any) -> None:
        settings = click.get_current_context().find_object(Settings)
        assert settings is not None
        call(settings, self.verb, self.fields, values)


def about(verb: Verb) -> tuple[str, dict[str, str]]:
    """Return (effect, answers) of a verb from the comment of the RPC, else of the request message."""
    for service in SERVICES:
        text, answers = comments.rpc(service, verb.name)
        if text:
            break
    else:
        text, answers = comments.summary(verb.request.DESCRIPTOR.full_name), {}
    return text, answers


def targeting() -> list[click.Parameter]:
    return [
        click.Option(["--model"], default="", metavar="NAME", help="Only the stages of this model."),
        click.Option(["--slot", "slots"], multiple=True, metavar="SLOT", help="Only this stage.  [repeatable]"),
        click.Option(
            ["--stage", "stages"],
            multiple=True,
            metavar="NAME",
            help="Only this logical stage of a pipeline, all its replicas.  [repeatable]",
        ),
        click.Option(
            ["--request-id"],
            default="",
            metavar="UUIDv7",
            help="Repeat an earlier call: it runs at most once.  [default: a new one]",
        ),
    ]


def call(settings: Settings, verb: Verb, options: list[Field], values: dict[str, Any]) -> None:
    """Send a verb and print the operation.

    Raises OperationFailed if the operation did not end OK. Errors of the request are raised before the call.
    """
    request = verb.request()
    for field in options:
        message_options.assign(request, field, values[field.parameter])
    if isinstance(request, PauseGenerationRequest) and not request.by:
        request.by = f"{_user()}@{socket.gethostname()}"
    if isinstance(request, CheckWeightsRequest):
        as_verified(request)
    try:
        check(request)
        _send(settings, verb, request, values)
    except RlctlError as error:
        raise error if machine_readable(settings) else message_options.as_typed(error, options) from None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container the user id may have no name
        return str(os.getuid())


def _send(settings: Settings, verb: Verb, request: Any, values: dict[str, Any]) -> None:
    from rlctl.ports import new_uuid7

    mutates = verb.mutates(request)
    if mutates and not settings.dry_run:
        _ = settings.endpoint  # chosen before the questions about that fleet
        settings.announce_fleet()
    if mutates and verb.reads_if is not None and not settings.dry_run:
        settings.confirm(f"This {verb.cli} changes the stages. Go on?", unasked=False)
    if isinstance(request, PauseGenerationRequest) and not request.mode and not settings.dry_run:
        affected = f"the requests with adapter {request.adapter}" if request.adapter else "the requests"
        settings.confirm(f"Without --mode, a pause aborts {affected} that run and wait. Abort them?")
    settings.request_id = values["request_id"] or new_uuid7()
    settings.mutating = mutates and not settings.dry_run
    if settings.verbose:
        settings.say(f"request_id {settings.request_id}")

    def farewell() -> None:
        if settings.mutating:
            click.echo(
                f"\nStopped waiting; the operation goes on. request_id: {settings.request_id}\n"
                f"  Show it: rlctl get operation {settings.request_id}\n"
                f"  Wait for it again: {settings.command(request_id=settings.request_id)}",
                err=True,
            )

    with (
        connected(settings) as fleet,
        interruptible(farewell),
        progress(settings, fleet, settings.request_id),
    ):
        operation = fleet.call(
            request,
            model=values["model"],
            slots=values["slots"],
            stages=values["stages"],
            timeout_s=settings.timeout_s,
            request_id=settings.request_id,
            validate_only=settings.dry_run,
            check=False,
        )
    show(settings, operations.view(operation))
    if operation.state not in (OPERATION_STATE_OK, OPERATION_STATE_RUNNING):
        raise OperationFailed(operation)
    if mutates:
        settings.say(operations.summary(operation))
        if slots := operations.stale(operation):
            settings.say(f"STALE: {', '.join(slots)}. {Reason.WEIGHTS_STALE.next_step}")
