"""The journal in SQLite: what it keeps, and what it refuses rather than begin without records."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.journal import sqlite
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.ports import Delete, Put


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "j.db"


def write_some(path: Path) -> None:
    asyncio.run(_write_some(path))


async def _write_some(path: Path) -> None:
    journal = SqliteJournal(path)
    await journal.write([Put("a", f"{n:04}", bytes(500)) for n in range(200)])
    journal.close()


@contextmanager
def refused(path: Path, words: str) -> Iterator[None]:
    """The journal cannot be opened, says why and what to do, and what lies there is what lay there before."""
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(RlctlError, match=words) as caught:
        yield
    assert caught.value.reason is Reason.JOURNAL_FAILED
    assert caught.value.next_step
    after = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert {name: after.get(name) for name in before} == before


async def test_what_was_written_is_there_after_a_restart(path: Path) -> None:
    journal = SqliteJournal(path)
    await journal.write([Put("a", "2", b"two"), Put("a", "1", b"one"), Put("b", "1", b"x")])
    await journal.write([Put("a", "2", b"zwei"), Delete("b", "1")])
    journal.close()
    again = SqliteJournal(path)
    assert list(again.read("a")) == [("1", b"one"), ("2", b"zwei")]
    assert list(again.read("b")) == []
    again.close()


async def test_writes_side_by_side_all_become_durable(path: Path) -> None:
    journal = SqliteJournal(path)
    await asyncio.gather(*(journal.write([Put("a", f"{n:03}", b"")]) for n in range(200)))
    journal.close()
    again = SqliteJournal(path)
    assert len(list(again.read("a"))) == 200
    again.close()


def test_one_that_another_coordinator_holds_is_refused(path: Path) -> None:
    journal = SqliteJournal(path)
    with refused(path, "locked"):
        SqliteJournal(path)
    journal.close()


def test_a_locked_journal_names_the_process_that_uses_it(path: Path) -> None:
    journal = SqliteJournal(path)
    with pytest.raises(RlctlError, match=rf"locked by process {os.getpid()} \(.*pytest"):
        SqliteJournal(path)
    journal.close()


def test_two_that_make_it_at_the_same_time_do_not_both_hold_it(path: Path) -> None:
    made: list[SqliteJournal] = []
    with pytest.MonkeyPatch.context() as patch:
        link = sqlite.os.link

        def link_later(draft: Path, target: Path) -> None:
            patch.undo()
            made.append(SqliteJournal(path))
            link(draft, target)

        patch.setattr(sqlite.os, "link", link_later)
        with pytest.raises(RlctlError, match="locked"):
            SqliteJournal(path)
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []
    made[0].close()


def test_one_whose_file_was_moved_is_held_no_more(path: Path) -> None:
    journal = SqliteJournal(path)
    assert journal.owned()
    path.rename(path.with_name("elsewhere.db"))
    assert not journal.owned()
    path.write_bytes(b"a successor's")
    assert not journal.owned()
    journal.close()


async def test_nothing_is_said_to_be_durable_in_a_file_that_was_moved(path: Path) -> None:
    """A version that is published there would be known to nobody but a coordinator that is over."""
    journal = SqliteJournal(path)
    await journal.write([Put("a", "1", b"one")])
    await asyncio.to_thread(path.rename, path.with_name("elsewhere.db"))
    with pytest.raises(RlctlError, match="moved or replaced") as caught:
        await journal.write([Put("a", "2", b"two")])
    assert caught.value.reason is Reason.JOURNAL_FAILED
    assert [key for key, _ in journal.read("a")] == ["1"]
    journal.close()


def test_a_file_that_is_no_journal(path: Path) -> None:
    path.write_bytes(b"this is not a database, and long enough to look at" * 10)
    with refused(path, "not a database"):
        SqliteJournal(path)


def test_a_database_of_somebody_else(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with refused(path, "not written by rlctl"):
        SqliteJournal(path)


def test_a_file_that_was_emptied_is_not_taken_for_a_new_one(path: Path) -> None:
    write_some(path)
    path.write_bytes(b"")
    with refused(path, "empty"):
        SqliteJournal(path)


def test_a_file_that_was_cut_short(path: Path) -> None:
    write_some(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with refused(path, r"malformed|damaged"):
        SqliteJournal(path)


def test_a_file_with_pages_of_something_else(path: Path) -> None:
    write_some(path)
    damaged = bytearray(path.read_bytes())
    damaged[4096 * 2 : 4096 * 4] = b"\xa5" * 8192
    path.write_bytes(damaged)
    with refused(path, "damaged: Page"):
        SqliteJournal(path)


def test_a_file_that_is_gone_while_its_log_is_there(path: Path) -> None:
    path.with_name("j.db-wal").write_bytes(b"records")
    with refused(path, "j.db-wal has records"):
        SqliteJournal(path)
    assert not path.exists()


def test_one_of_a_newer_schema(path: Path) -> None:
    SqliteJournal(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(RlctlError, match="schema 99, this version writes 1") as caught:
        SqliteJournal(path)
    assert "newer" in caught.value.next_step


def test_one_of_an_older_schema_is_brought_to_this_one_and_keeps_its_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_some(path)
    later = (*sqlite.MIGRATIONS, "ALTER TABLE record ADD COLUMN note TEXT", "UPDATE record SET note = 'old'")
    monkeypatch.setattr(sqlite, "MIGRATIONS", later)
    journal = SqliteJournal(path)
    assert len(list(journal.read("a"))) == 200
    journal.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT DISTINCT note FROM record").fetchall() == [("old",)]
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_some(path)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "MIGRATIONS", (*sqlite.MIGRATIONS, "DROP TABLE record", "no statement"))
        with pytest.raises(RlctlError, match="syntax error"):
            SqliteJournal(path)
    journal = SqliteJournal(path)
    assert len(list(journal.read("a"))) == 200
    journal.close()


async def test_a_disk_that_is_full_refuses_the_write_and_keeps_what_was_there(path: Path) -> None:
    journal = SqliteJournal(path)
    await journal.write([Put("a", "1", b"one")])
    (pages,) = journal._connection.execute("PRAGMA page_count").fetchone()
    journal._connection.execute(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(RlctlError, match="full") as caught:
        await journal.write([Put("a", "2", bytes(1_000_000))])
    assert caught.value.reason is Reason.JOURNAL_FAILED
    await journal.write([Put("a", "3", b"three")])
    journal.close()
    again = SqliteJournal(path)
    assert list(again.read("a")) == [("1", b"one"), ("3", b"three")]
    again.close()


NO_MEMORY = """
import asyncio, pathlib, sys
from rlctl.contract.errors import RlctlError
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.ports import Put

async def main():
    journal = SqliteJournal(pathlib.Path(sys.argv[1]))
    journal._connection.execute("PRAGMA hard_heap_limit = 8000000")
    async with asyncio.timeout(20):
        try:
            await journal.write([Put("a", "1", b"one"), Put("a", "2", bytes(30_000_000))])
        except RlctlError as error:
            print(error.reason.name, error.message)
        await journal.write([Put("a", "3", b"three")])
    journal.close()

asyncio.run(main())
"""


def test_a_write_without_memory_is_refused_and_the_next_one_succeeds(path: Path) -> None:
    """In a process of its own: the limit of SQLite's memory cannot be raised again."""
    ran = subprocess.run(
        [sys.executable, "-c", NO_MEMORY, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("JOURNAL_FAILED")
    assert "out of memory" in ran.stdout
    with closing(SqliteJournal(path)) as journal:
        assert list(journal.read("a")) == [("3", b"three")]


async def test_a_write_that_sqlite_cannot_take_is_refused_and_the_next_one_succeeds(path: Path) -> None:
    with closing(SqliteJournal(path)) as journal:
        with pytest.raises(RlctlError, match="surrogates not allowed") as caught:
            async with asyncio.timeout(5):
                await journal.write([Put("a", "1", b"one"), Put("a", "\ud800", b"")])
        assert caught.value.reason is Reason.JOURNAL_FAILED
        await journal.write([Put("a", "2", b"two")])
        assert list(journal.read("a")) == [("2", b"two")]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RlctlError, match=r"Not a directory|File exists") as caught:
        SqliteJournal(tmp_path / "file" / "j.db")
    assert caught.value.reason is Reason.JOURNAL_FAILED


async def test_nobody_waits_for_a_write_whose_loop_has_ended(path: Path) -> None:
    journal = SqliteJournal(path)

    def leave() -> None:
        async def write_and_go() -> None:
            asyncio.ensure_future(journal.write([Put("a", "1", b"")]))  # noqa: RUF006 - ends with its loop
            await asyncio.sleep(0)

        asyncio.run(write_and_go())

    await asyncio.to_thread(leave)
    await journal.write([Put("a", "2", b"")])
    await eventually(lambda: [key for key, _ in journal.read("a")] == ["1", "2"])
    journal.close()


async def test_what_comes_after_the_end_is_refused(path: Path) -> None:
    journal = SqliteJournal(path)
    journal.close()
    with pytest.raises(RlctlError, match="closed") as caught:
        async with asyncio.timeout(5):
            await journal.write([Put("a", "1", b"one")])
    assert caught.value.reason is Reason.JOURNAL_FAILED
