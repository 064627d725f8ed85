"""The output of failures: the cause, then the next step; as JSON if data is printed as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from rlctl.cli.app.exit_codes import Exit, of_error
from rlctl.cli.app.settings import MACHINE_FORMATS, Settings
from rlctl.cli.render import operations
from rlctl.contract.errors import OperationFailed, RlctlError
from rlctl.contract.verbs import VERBS


def report(settings: Settings, error: RlctlError) -> Exit:
    """Print an error on stderr and return the exit code, also if stderr cannot be written."""
    code = of_error(error, mutating=settings.mutating)
    with contextlib.suppress(OSError):
        _print(settings, error, code)
    return code


def _print(settings: Settings, error: RlctlError, code: Exit) -> None:
    if machine_readable(settings):
        click.echo(json.dumps({"error": _as_data(settings, error, code)}, ensure_ascii=False), err=True)
        return
    where = f" [{error.field}]" if error.field else ""
    # Each of several problems has a line and a place: the common reason is in the first line.
    first, *further_lines = error.message.split("\n")
    about = f"({error.reason.name}{'' if further_lines else where})"
    click.echo("\n".join([f"{_red(settings, 'Error:')} {first}  {about}", *further_lines]), err=True)
    for line in [error.next_step, *_advice(settings, error, code)]:
        if line:
            click.echo(f"  {line}", err=True)


def report_click(settings: Settings, error: click.ClickException) -> Exit:
    """Print an error of the command line, or the failure of a command on this machine."""
    usage = isinstance(error, click.UsageError)
    code = Exit.USAGE if usage else Exit.FAILED
    with contextlib.suppress(OSError):
        if machine_readable(settings):
            data = {"reason": "USAGE" if usage else "FAILED", "message": error.format_message(), "exit_code": int(code)}
            click.echo(json.dumps({"error": data}, ensure_ascii=False), err=True)
        else:
            error.show()
    return code


def machine_readable(settings: Settings) -> bool:
    """Return whether data is printed for machines. Never raises, since errors call this function."""
    try:
        return settings.output in MACHINE_FORMATS
    except RlctlError:
        return False


def _as_data(settings: Settings, error: RlctlError, code: Exit) -> dict[str, Any]:
    data: dict[str, Any] = {
        "reason": error.reason.name,
        "status": error.status,
        "message": error.message,
        "field": error.field,
        "next_step": error.next_step,
        "metadata": error.metadata,
        "exit_code": int(code),
    }
    if (fleet := settings.fleet_choice.fleet) is not None:
        data["fleet"] = {"name": fleet.name, "endpoint": fleet.endpoint}
    if settings.request_id and settings.mutating:
        data["request_id"] = settings.request_id
        data["retry"] = settings.command(request_id=settings.request_id)
    if isinstance(error, OperationFailed):
        data["operation_id"] = error.operation.operation_id
        data["unconfirmed"] = operations.unconfirmed(error.operation)
    return data


def _advice(settings: Settings, error: RlctlError, code: Exit) -> Iterator[str]:
    if not settings.request_id or not settings.mutating:
        return
    command = settings.command(request_id=settings.request_id)
    if isinstance(error, OperationFailed):
        yield f"Read this record again: {command}"
        slots = operations.retriable(error.operation)
        verb = VERBS.get(error.operation.verb)
        if slots and verb is not None:
            retry = settings.command(slots=() if verb.in_update else slots)
            yield f"Try again at the targets that did not confirm: {retry}"
    elif code in (Exit.UNKNOWN, Exit.UNREACHABLE, Exit.TIMEOUT):
        yield f"Retry safely, it runs at most once: {command}"


def _red(settings: Settings, text: str) -> str:
    try:
        color = settings.color
    except RlctlError:
        color = "never"
    colored = color == "always" or (color == "auto" and sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
    return click.style(text, fg="red", bold=True) if colored else text
