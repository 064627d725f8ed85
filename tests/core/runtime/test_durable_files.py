"""A file that is replaced survives a loss of power: old or new, never empty."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlctl.cli.main import root
from rlctl.contract.scopes import Grant
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.coordinator.journal.start_over import start_over
from rlctl.coordinator.maintenance import restore
from rlctl.ports import Put
from rlctl.transport import access_file
from rlctl.transport.tls.authority import Authority
from rlctl.v1.journal_pb2 import FleetRecord

Calls = list[tuple[str, Path]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The calls of fsync, with the file, and of replace, with both names."""
    made: Calls = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        made.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def recorded_replace(draft: Path, target: Path) -> None:
        made.extend([("from", draft), ("to", target)])
        replace(draft, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    yield made
    monkeypatch.undo()


def journal(path: Path) -> Path:
    record = Put("fleet", "", FleetRecord(fleet_epoch=1).SerializeToString())
    with closing(SqliteJournal(path)) as opened:
        asyncio.run(opened.write([record]))
    return path


def change_access(directory: Path) -> list[Path]:
    path = directory / "access.json"
    access_file.write(path, {"ci": access_file.Entry("ci", (Grant.parse("viewer"),))})
    return [path]


def make_certificates(directory: Path) -> list[Path]:
    files = Authority.init(directory, "lab").issue("client/alice")
    return [directory / "ca.key", directory / "ca.crt", files.key, files.cert]


def restore_journal(directory: Path) -> list[Path]:
    backup, path = journal(directory / "backup.db"), directory / "journal.db"
    restore(backup, path)
    restore(backup, path)
    return [path, path]


def begin_journal_anew(directory: Path) -> list[Path]:
    path = journal(directory / "journal.db")
    start_over(path)
    return [path]


def back_up_journal(directory: Path) -> list[Path]:
    path, target = journal(directory / "journal.db"), directory / "backup.db"
    result = CliRunner().invoke(root, ["journal", "backup", str(target), "--journal", str(path)])
    assert result.exit_code == 0, result.output
    return [target]


@pytest.mark.parametrize(
    "change", [change_access, make_certificates, restore_journal, begin_journal_anew, back_up_journal]
)
def test_the_new_content_is_on_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, calls: Calls, change: Callable[[Path], list[Path]]
) -> None:
    targets = change(tmp_path)
    replaced = [index for index, (call, path) in enumerate(calls) if call == "to" and path in targets]
    assert [calls[index][1] for index in replaced] == targets
    for index in replaced:
        _, draft = calls[index - 1]
        _, target = calls[index]
        assert ("fsync", draft) in calls[: index - 1]
        assert calls[index + 1] == ("fsync", target.parent)


def test_the_log_of_a_damaged_journal_has_lost_its_name_on_disk_before_a_backup_takes_the_journals_name(
    tmp_path: Path, calls: Calls
) -> None:
    """SQLite would write the old log into the new journal."""
    backup, path, log = journal(tmp_path / "backup.db"), tmp_path / "journal.db", tmp_path / "journal.db-wal"
    path.write_bytes(b"no journal" * 1000)
    log.write_bytes(b"a log")
    result = CliRunner().invoke(root, ["journal", "restore", str(backup), "--journal", str(path), "--yes"])
    assert result.exit_code == 0, result.output
    assert ("fsync", tmp_path) in calls[calls.index(("from", log)) : calls.index(("to", path))]


def test_a_new_journals_name_is_on_disk_before_its_first_record(tmp_path: Path, calls: Calls) -> None:
    SqliteJournal(tmp_path / "journal.db").close()
    assert ("fsync", tmp_path) in calls
