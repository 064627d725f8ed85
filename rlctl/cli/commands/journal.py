"""``rlctl journal``: verify, back up, restore and compact the coordinator's journal."""

from __future__ import annotations

import dataclasses
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rlctl.cli.app.connection import bounded
from rlctl.cli.app.global_options import Command, pass_settings
from rlctl.cli.app.settings import Settings
from rlctl.cli.render import values
from rlctl.cli.render.printer import View, show
from rlctl.cli.render.tables import Table, facts
from rlctl.contract.errors import Reason
from rlctl.launch.supervisor.fleet_state import state_directory
from rlctl.runtime import private_files


def _of_a_file(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option(
        "--journal",
        "file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Journal of a coordinator that has ended.",
    )(command)
    return click.option("--name", help="Journal of the fleet of this name, which `rlctl up` started on this machine.")(
        command
    )


@click.command("verify", cls=Command)
@_of_a_file
@pass_settings
def journal_verify(settings: Settings, file: Path | None, name: str | None) -> None:
    """Check a journal: every page, and that a coordinator can take it in.

    Without --journal and --name, a copy of the running coordinator's journal is checked. Nothing is written to the
    journal. A backup is a journal too: --journal BACKUP checks it.
    """
    from rlctl.coordinator.maintenance import verify

    path = _file(file, name)
    if path is not None:
        contents = verify(path)
        _show_contents(settings, str(path), contents)
        return
    with tempfile.TemporaryDirectory(prefix="rlctl-journal-") as directory:
        copied = Path(directory) / "journal.db"
        _fetch(settings, copied)
        _show_contents(settings, settings.endpoint, verify(copied))


@click.command("backup", cls=Command)
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
@_of_a_file
@click.option("--force", is_flag=True, help="Replace a file of this name, but no journal in use.")
@pass_settings
def journal_backup(settings: Settings, target: Path, file: Path | None, name: str | None, force: bool) -> None:
    """Copy a journal to FILE, and verify the copy.

    Without --journal and --name, the running coordinator sends its journal, also from another host. The fleet goes on
    meanwhile. The copy contains the fencing tokens of open updates; its mode is 0600.
    """
    from rlctl.coordinator.journal import files
    from rlctl.coordinator.maintenance import verify

    if target.exists() and not force:
        raise Reason.FIELD_INVALID.error(f"{target} exists", field="FILE", next_step="Name another, or add --force.")
    path = _file(file, name)
    files.refuse_as_target(target, path)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        if path is None:
            _fetch(settings, draft)
        elif path.exists():
            files.copy(path, draft)
        else:
            raise files.missing(path)
        contents = verify(draft)
        private_files.put_in_place(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    _show_contents(settings, str(target), contents)


@click.command("restore", cls=Command)
@click.argument("backup", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="BACKUP")
@_of_a_file
@pass_settings
def journal_restore(settings: Settings, backup: Path, file: Path | None, name: str | None) -> None:
    """Put a backup in the place of a journal. The old file is kept beside it.

    The backup is verified first. A journal that a coordinator has open is refused. Epoch and sequences of the old file,
    where it can be read, are kept: they never go back. Operations that are newer than the backup are not on record;
    repeats of them are refused.
    """
    from rlctl.coordinator.maintenance import restore, verify

    path = _file(file, name) or state_directory() / "journal.db"
    contents = verify(backup)
    if settings.dry_run:
        _show_contents(settings, str(backup), contents)
        settings.say(f"Nothing was done; {path} would be replaced.")
        return
    settings.confirm(f"Replace {path} by the backup of epoch {contents.epoch}?")
    old_file = restore(backup, path)
    data = {"journal": str(path), "kept": str(old_file or "")}
    rows = facts([("Journal", str(path)), ("Old file", str(old_file or "none"))])
    show(settings, View(data, lambda _: [rows], lambda: [str(path)]))
    settings.say("Start the coordinator. If a stage obeys a higher epoch: `rlctl take-over SLOT`.")


@click.command("compact", cls=Command)
@_of_a_file
@pass_settings
def journal_compact(settings: Settings, file: Path | None, name: str | None) -> None:
    """Make the file of a journal as small as its records.

    Operations over the coordinator's limits of retention are dropped, as it does by itself. A journal that a
    coordinator has open is refused.
    """
    from rlctl.coordinator.maintenance import compact, verify

    path = _file(file, name) or state_directory() / "journal.db"
    if settings.dry_run:
        _show_contents(settings, str(path), verify(path))
        settings.say(f"Nothing was done; {path} would be compacted.")
        return
    dropped, before, after = compact(path)
    data = {"journal": str(path), "dropped_operations": dropped, "bytes_before": before, "bytes_after": after}
    rows = [("Journal", str(path)), ("Dropped operations", str(dropped)), ("Bytes", f"{before} before, {after} after")]
    show(settings, View(data, lambda _: [facts(rows)], lambda: [str(path)]))


def _file(file: Path | None, name: str | None) -> Path | None:
    """Return the file that the options name. Raises a usage error for both."""
    if file is not None and name is not None:
        raise click.UsageError("--journal and --name exclude each other")
    return file if name is None else state_directory(name) / "journal.db"


def _fetch(settings: Settings, target: Path) -> None:
    with bounded(settings) as fleet, open(target, "wb", opener=private_files.opener) as copied:
        for part in fleet.backup_journal():
            copied.write(part)


def _show_contents(settings: Settings, origin: str, contents: Any) -> None:
    data = {"journal": origin, **dataclasses.asdict(contents)}
    about = [
        ("Journal", f"{origin}: sound"),
        ("Size", values.count(contents.size, "byte")),
        ("Epoch", str(contents.epoch)),
        *((f"Model {name}", version) for name, version in contents.versions.items()),
        ("Newest operation", contents.newest),
    ]
    records = Table(("RECORDS", "NUMBER"), [(kind, str(number)) for kind, number in contents.records.items() if number])
    show(settings, View(data, lambda _: [facts(about), records], lambda: [origin]))
