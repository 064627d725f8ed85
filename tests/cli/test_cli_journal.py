"""``rlctl journal``: copies of a journal in use through its coordinator, and a fleet that goes on from a backup."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from cli_helpers import Cli, LiveFleet, started

from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.sdk.blocking import connect
from rlctl.testing.in_process_fleet import StageSpec


def test_a_journal_in_use_is_verified_and_backed_up_while_operations_run(
    rlctl: LiveFleet, cli: Cli, tmp_path: Path
) -> None:
    assert rlctl("pause").code == rlctl("continue").code == 0
    stop = threading.Event()

    def operate() -> None:
        with connect(rlctl.endpoint) as fleet:
            while not stop.is_set():
                fleet.flush_cache()

    operating = threading.Thread(target=operate)
    operating.start()
    try:
        verified = rlctl("journal", "verify", "-o", "json").data
        backups = [rlctl("journal", "backup", str(tmp_path / f"{number}.db"), "-o", "json") for number in range(3)]
    finally:
        stop.set()
        operating.join()
    assert (verified["epoch"], verified["records"]["slot"]) == (1, 2)
    assert verified["versions"] == {"actor": "initial#1"}
    counts = [backup.data["records"]["operation"] for backup in backups]
    assert counts == sorted(counts)
    assert counts[0] >= verified["records"]["operation"] >= 2
    for number in range(3):
        assert (tmp_path / f"{number}.db").stat().st_mode & 0o777 == 0o600
    again = cli("journal", "verify", "--journal", str(tmp_path / "2.db"), "-o", "json").data
    assert again["records"] == backups[2].data["records"]


def test_a_backup_that_the_coordinator_cannot_make_leaves_no_file_and_says_why(
    rlctl: LiveFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "backup.db"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    failed = rlctl("journal", "backup", str(target))
    assert failed.code == 1
    assert "the journal cannot be copied: [Errno 2] No such file or directory" in failed.err
    assert "TMPDIR" in failed.err
    assert not [path.name for path in tmp_path.iterdir() if "backup" in path.name]


def test_a_coordinator_that_is_killed_during_backups_keeps_its_journal_and_leaves_whole_backups(
    cli: Cli, tmp_path: Path
) -> None:
    journal, backups = tmp_path / "journal.db", tmp_path / "backups"
    backups.mkdir()
    command = [sys.executable, "-m", "rlctl", "coordinator", "--journal", str(journal)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as coordinator:
        assert coordinator.stdout is not None
        address = json.loads(coordinator.stdout.readline())["address"]
        killing = threading.Timer(1.0, coordinator.kill)
        killing.start()
        codes = []
        while not codes or codes[-1] == 0:
            codes.append(cli("--endpoint", address, "journal", "backup", str(backups / f"{len(codes)}.db")).code)
        killing.join()
    assert len(codes) > 1
    assert sorted(path.name for path in backups.iterdir()) == sorted(f"{n}.db" for n in range(len(codes) - 1))
    for backup in backups.iterdir():
        assert cli("journal", "verify", "--journal", str(backup)).code == 0
    assert cli("journal", "verify", "--journal", str(journal), "-o", "json").data["epoch"] == 1


def test_a_backup_does_not_replace_a_file_unasked(rlctl: LiveFleet, tmp_path: Path) -> None:
    target = tmp_path / "backup.db"
    target.write_text("other")
    refused = rlctl("journal", "backup", str(target))
    assert (refused.code, target.read_text()) == (2, "other")
    assert "--force" in refused.err
    assert rlctl("journal", "backup", str(target), "--force").code == 0
    assert target.read_bytes().startswith(b"SQLite format 3")
    live = tmp_path / "journal.db"
    inode = live.stat().st_ino
    refused = rlctl("journal", "backup", str(live), "--force")
    assert (refused.code, live.stat().st_ino) == (2, inode)
    assert "in use" in refused.err


def test_the_file_of_a_coordinator_that_runs_is_refused(rlctl: LiveFleet, cli: Cli, tmp_path: Path) -> None:
    backup = str(tmp_path / "backup.db")
    assert rlctl("journal", "backup", backup).code == 0
    file = str(tmp_path / "journal.db")
    for words in (("verify",), ("compact",), ("restore", backup), ("backup", str(tmp_path / "other.db"))):
        refused = cli("journal", *words, "--journal", file)
        assert refused.code == 1, words
        assert "it is locked" in refused.err
    assert "through its coordinator" in cli("journal", "verify", "--journal", file).err
    assert not (tmp_path / "other.db").exists()
    assert rlctl("pause").code == 0  # the journal is still the coordinator's


def test_a_fleet_goes_on_from_a_backup_with_its_epoch(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights.txt").write_text("one")
    specs = [StageSpec("a", str(tmp_path / "a"))]
    journal, backup = tmp_path / "journal.db", tmp_path / "backup.db"
    with started(journal, specs) as rlctl:
        assert rlctl("pause", "--reason", "kept").code == 0
        assert rlctl("journal", "backup", str(backup)).code == 0
        assert rlctl("continue").code == 0
    for _ in range(2):
        with started(journal, specs):
            pass
    dry = cli("journal", "restore", str(backup), "--journal", str(journal), "--dry-run")
    assert "would be replaced" in dry.err
    restored = cli("journal", "restore", str(backup), "--journal", str(journal), "-o", "json")
    assert restored.code == 0
    assert Path(restored.data["kept"]).exists()
    assert cli("journal", "verify", "--journal", restored.data["kept"]).code == 0
    compacted = cli("journal", "compact", "--journal", str(journal))
    assert re.search(r"Bytes: +\d+ before, \d+ after", compacted.out)
    assert asyncio.run(taken_over(journal)) == (5, ["kept"])  # epochs 1 to 3, and the one of compact


async def taken_over(journal: Path) -> tuple[int, list[str]]:
    """Epoch of a coordinator that is started on a journal, and the reasons of the pauses in force."""
    server = CoordinatorServer(CoordinatorConfig(journal, "127.0.0.1:0"))
    await server.start()
    roster = server.coordinator.roster
    seen = roster.epoch, [record.pause.reason for record in roster.pauses.in_force]
    await server.stop()
    return seen


def test_journals_that_are_not_there_or_none_are_named(cli: Cli, tmp_path: Path) -> None:
    nowhere = cli("journal", "verify", "--journal", str(tmp_path / "no.db"))
    assert nowhere.code == 1
    assert "there is no such file" in nowhere.err
    text = tmp_path / "text.db"
    text.write_text("hello " * 1000)
    for words in (("verify",), ("compact",), ("backup", str(tmp_path / "out.db"))):
        assert cli("journal", *words, "--journal", str(text)).code == 1
    assert not list(tmp_path.glob("*out*"))
    assert cli("journal", "verify", "--journal", str(text), "--name", "x").code == 2
    assert cli("--endpoint", "127.0.0.1:1", "journal", "verify").code == 5
