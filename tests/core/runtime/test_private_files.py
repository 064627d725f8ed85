"""What a fleet keeps on disk is its user's alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.launch.local.launcher import LocalLauncher
from rlctl.launch.local.log_files import keep_short
from rlctl.launch.supervisor import fleet_state
from rlctl.ports import Put


@pytest.fixture(autouse=True)
def _others_could_read() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())}


async def test_a_journal_and_its_directory(tmp_path: Path) -> None:
    with closing(SqliteJournal(tmp_path / "fleet" / "journal.db")) as journal:
        await journal.write([Put("a", "1", b"x")])
        found = modes(tmp_path / "fleet")
        assert found.pop("fleet") == 0o700
        assert set(found) >= {"journal.db", "journal.db-wal"}
        assert set(found.values()) == {0o600}


async def test_a_journal_that_others_could_read_until_now(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    SqliteJournal(path).close()
    path.chmod(0o644)
    with closing(SqliteJournal(path)) as journal:
        await journal.write([Put("a", "1", b"x")])
        assert {mode for name, mode in modes(tmp_path).items() if name.startswith("journal.db")} == {0o600}


def test_the_state_of_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = fleet_state.state_directory("lab")
    directory.mkdir(parents=True, mode=0o755)
    with fleet_state.claimed("lab"):
        fleet_state.write(fleet_state.FleetState("lab", 1, "now", fleet_state.READY, "127.0.0.1:1", str(directory)))
        assert modes(directory) == {"lab": 0o700, "lock": 0o600, "fleet.json": 0o600}


def test_logs_and_what_is_kept_of_them(tmp_path: Path) -> None:
    process = LocalLauncher(tmp_path / "logs", module="rlctl").start("one", ["version", "--no-such-option"])
    process.wait()
    assert modes(tmp_path / "logs") == {"logs": 0o700, "one.log": 0o600}
    assert keep_short(process.log, at_most=0)
    assert modes(tmp_path / "logs") == {"logs": 0o700, "one.log": 0o600, "one.log.1": 0o600}
