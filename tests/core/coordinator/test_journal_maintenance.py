"""Journals that are copied, verified, restored and compacted, in use and not."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.journal.files import refuse_as_target
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.coordinator.maintenance import compact, restore, verify
from rlctl.coordinator.server import CoordinatorConfig, CoordinatorServer
from rlctl.ports import Put, SystemClock
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.coordinator_pb2 import AuditRecord, BackupJournalRequest
from rlctl.v1.journal_pb2 import FleetRecord, ModelRecord, OperationRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, OPERATION_STATE_RUNNING, Operation

WRITER = """
import asyncio, os, sys
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.ports import Put
from rlctl.v1.journal_pb2 import FleetRecord

async def write():
    journal = SqliteJournal(sys.argv[1])
    for number in range(1, 1 << 30):
        key = Put("key", f"{number:09}", b"")
        await journal.write([Put("fleet", "", FleetRecord(fleet_epoch=number).SerializeToString()), key])
        print(number, flush=True)

asyncio.run(write())
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def write(path: Path, *puts: Put) -> None:
    journal = SqliteJournal(path)
    asyncio.run(journal.write(puts))
    journal.close()


def fleet(epoch: int) -> Put:
    return Put("fleet", "", FleetRecord(fleet_epoch=epoch).SerializeToString())


def model(sequence: int, reserved: int = 0) -> Put:
    latest = WeightVersion(label=f"v{sequence}", sequence=sequence)
    record = ModelRecord(name="actor", latest=latest, reserved_sequence=max(reserved, sequence))
    return Put("model", "actor", record.SerializeToString())


def operation(padding: int = 0) -> Put:
    clock = SystemClock()
    made = Operation(operation_id=clock.new_id(), state=OPERATION_STATE_OK, verb="FlushCache", model="x" * padding)
    made.create_time.CopyFrom(clock.wall())
    made.done_time.CopyFrom(clock.wall())
    return Put("operation", made.operation_id, OperationRecord(operation=made).SerializeToString())


def files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def sizes(directory: Path) -> dict[str, int]:
    """Sizes of files: to read a file in the process that has it locked ends the lock."""
    return {file.name: file.stat().st_size for file in directory.iterdir()}


def killed_while_writing(path: Path, writes: int) -> int:
    """A coordinator's journal as kill -9 leaves it; returns the number of the last write that was confirmed."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        confirmed = 0
        while confirmed < writes:
            confirmed = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        return max([confirmed, *(int(line) for line in writer.stdout.read().splitlines())])


def test_a_sound_journal_is_verified_and_stays_as_it_is(path: Path) -> None:
    made = [operation(), operation()]
    write(path, fleet(4), model(7), *made)
    newest = max(put.key for put in made)
    before = files(path.parent)
    contents = verify(path)
    assert files(path.parent) == before
    assert (contents.epoch, contents.versions, contents.newest) == (4, {"actor": "v7#7"}, newest)
    assert {kind: number for kind, number in contents.records.items() if number} == {
        "fleet": 1,
        "model": 1,
        "operation": 2,
    }


def test_a_journal_after_kill_9_is_verified_with_its_log_and_stays_as_it_is(path: Path) -> None:
    confirmed = killed_while_writing(path, 50)
    before = files(path.parent)
    assert "journal.db-wal" in before
    contents = verify(path)
    assert files(path.parent) == before
    assert contents.epoch in (confirmed, confirmed + 1)
    assert contents.records["key"] == contents.epoch


@pytest.mark.parametrize("put", [Put("operation", "o", b"\xff\xff"), Put("slot", "a", b"\xff\xff")])
def test_a_record_that_a_coordinator_cannot_take_in_is_an_error_that_names_it(path: Path, put: Put) -> None:
    write(path, fleet(1), put)
    with pytest.raises(RlctlError, match=f"{put.kind} record {put.key!r} is damaged") as caught:
        verify(path)
    assert caught.value.reason is Reason.JOURNAL_FAILED


def test_a_damaged_page_is_an_error(path: Path) -> None:
    write(path, fleet(1), *(Put("key", f"{n:05}", b"") for n in range(5000)))
    with path.open("r+b") as file:
        file.seek(5 * 4096)
        file.write(b"\xa5" * 4096)
    with pytest.raises(RlctlError, match=r"damaged|malformed") as caught:
        verify(path)
    assert caught.value.reason is Reason.JOURNAL_FAILED


def test_copies_of_a_journal_in_use_hold_whole_writes_only(path: Path, tmp_path: Path) -> None:
    async def both() -> None:
        journal = SqliteJournal(path)
        copying = asyncio.create_task(asyncio.to_thread(copies, journal))
        epoch = 0
        while not copying.done():
            epoch += 1
            await journal.write([fleet(epoch), Put("key", f"{epoch:09}", b"")])
        await copying
        assert epoch > 20
        journal.close()

    def copies(journal: SqliteJournal) -> None:
        last = 0
        for number in range(10):
            copy = tmp_path / f"copy-{number}.db"
            journal.copy(copy)
            contents = verify(copy)
            assert contents.records["key"] == contents.epoch >= last
            last = contents.epoch

    asyncio.run(both())
    copies_made = [file.name for file in tmp_path.glob("copy-*")]
    assert len(copies_made) == 10  # and no logs beside them


@pytest.mark.parametrize("work", ["verify", "compact", "restore"])
def test_a_journal_in_use_is_refused_by_the_name_of_its_holder(path: Path, tmp_path: Path, work: str) -> None:
    backup = tmp_path / "backup.db"
    write(backup, fleet(1))
    journal = SqliteJournal(path)
    asyncio.run(journal.write([fleet(1)]))
    before = sizes(tmp_path)
    with pytest.raises(RlctlError, match=rf"locked by process {os.getpid()} ") as caught:
        {"verify": verify, "compact": compact, "restore": lambda path: restore(backup, path)}[work](path)
    assert caught.value.next_step
    assert sizes(tmp_path) == before
    journal.close()


def test_a_backup_replaces_neither_its_journal_nor_one_in_use(path: Path, tmp_path: Path) -> None:
    backup, link = tmp_path / "backup.db", tmp_path / "link.db"
    write(backup, fleet(1))
    write(path, fleet(1))
    link.symlink_to(path)
    for target in (path, link):
        with pytest.raises(RlctlError, match="is the journal itself") as refused:
            refuse_as_target(target, path)
        assert (refused.value.reason, refused.value.field) == (Reason.FIELD_INVALID, "FILE")
    before = files(tmp_path)
    refuse_as_target(backup, path)
    refuse_as_target(tmp_path / "new.db", path)
    assert files(tmp_path) == before
    journal = SqliteJournal(path)
    asyncio.run(journal.write([fleet(2)]))
    with pytest.raises(RlctlError, match="in use"):
        refuse_as_target(path, None)
    journal.close()


def test_a_restored_journal_keeps_its_numbers_and_the_old_file(path: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    old = operation()
    write(backup, fleet(3), model(5), old)
    write(path, fleet(8), model(9, reserved=11), operation())
    kept = restore(backup, path)
    assert kept is not None
    assert verify(kept).versions == {"actor": "v9#9"}
    contents = verify(path)
    assert (contents.epoch, contents.versions, contents.newest) == (8, {"actor": "v5#5"}, old.key)
    journal = SqliteJournal(path)
    [(_, body)] = journal.read("model")
    [(_, forgotten)] = journal.read("forgotten")
    journal.close()
    assert ModelRecord.FromString(body).reserved_sequence == 11
    assert forgotten.decode() > old.key
    assert sorted(files(tmp_path)) == sorted(["backup.db", kept.name, "journal.db"])


def test_a_damaged_journal_is_replaced_by_a_backup_and_kept(path: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    write(backup, fleet(3), model(5))
    path.write_bytes(b"no journal at all" * 500)
    kept = restore(backup, path)
    assert kept is not None
    assert kept.read_bytes() == b"no journal at all" * 500
    assert verify(path).epoch == 3


def test_a_backup_that_is_not_sound_replaces_nothing(path: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    write(backup, fleet(3))
    backup.write_bytes(backup.read_bytes()[: backup.stat().st_size // 2])
    write(path, fleet(8))
    before = files(tmp_path)
    with pytest.raises(RlctlError):
        restore(backup, path)
    assert files(tmp_path) == before


def test_a_journal_is_restored_after_kill_9_with_the_epoch_of_its_log(path: Path, tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    write(backup, fleet(1), model(5))
    confirmed = killed_while_writing(path, 20)
    restore(backup, path)
    assert verify(path).epoch in (confirmed, confirmed + 1)
    assert not path.with_name("journal.db-wal").exists()


def test_compact_drops_by_the_coordinators_rule_and_gives_the_room_back(path: Path) -> None:
    made = [operation(20_000) for _ in range(40)]
    write(path, fleet(1), *made)
    dropped, before, after = compact(path, retained=30)
    assert (dropped, verify(path).records["operation"]) == (10, 30)
    assert after < before
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)


def test_compact_keeps_old_records_of_the_audit(path: Path) -> None:
    old = AuditRecord(method="FlushCache")
    old.time.FromSeconds(1_000_000_000)
    interrupted = Operation(operation_id=SystemClock().new_id(), state=OPERATION_STATE_RUNNING, verb="FlushCache")
    running = Put("operation", interrupted.operation_id, OperationRecord(operation=interrupted).SerializeToString())
    write(path, fleet(1), running, Put("audit", f"{old.time.ToNanoseconds():020d}-old", old.SerializeToString()))
    compact(path)
    # The end of the interrupted operation is the second record.
    assert verify(path).records["audit"] == 2


async def test_a_cancelled_backup_ends_after_its_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = CoordinatorServer(CoordinatorConfig(path, "127.0.0.1:0"))
    copying, go_on, written = threading.Event(), threading.Event(), []

    def copy(target: Path) -> None:
        copying.set()
        go_on.wait(10)
        target.write_bytes(b"copy")
        written.append(target)

    monkeypatch.setattr(server._journal, "copy", copy)
    parts = server.backup_journal(BackupJournalRequest())
    backup = asyncio.ensure_future(anext(parts))
    await asyncio.to_thread(copying.wait, 10)
    backup.cancel()
    asyncio.get_running_loop().call_later(0.1, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await backup
    (target,) = written
    assert not target.parent.exists()
    await server.stop()
