"""A journal that is put aside: the numbers of the fleet after it go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.coordinator.journal.start_over import previous, start_over
from rlctl.ports import Put
from rlctl.v1.common_pb2 import WeightVersion
from rlctl.v1.journal_pb2 import FleetRecord, ModelRecord


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def put(path: Path, *puts: Put) -> None:
    async def write() -> None:
        journal = SqliteJournal(path)
        await journal.write(puts)
        journal.close()

    asyncio.run(write())


def write(path: Path, *models: ModelRecord, epoch: int = 4, first_sequence: int = 0) -> None:
    fleet = FleetRecord(fleet_epoch=epoch, first_sequence=first_sequence)
    puts = [Put("model", model.name, model.SerializeToString()) for model in models]
    put(path, Put("fleet", "", fleet.SerializeToString()), *puts)


def read(path: Path) -> tuple[FleetRecord, list[str]]:
    """The fleet's record, and the names of models."""
    journal = SqliteJournal(path)
    [(_, body)] = journal.read("fleet")
    models = [name for name, _ in journal.read("model")]
    journal.close()
    return FleetRecord.FromString(body), models


def test_epoch_and_sequences_go_on_and_the_records_are_kept_aside(path: Path) -> None:
    latest = WeightVersion(label="a-7", sequence=9)
    critic = ModelRecord(name="critic", latest=WeightVersion(label="c", sequence=2), reserved_sequence=3)
    write(path, ModelRecord(name="actor", latest=latest, reserved_sequence=11), critic)
    for suffix in ("", "-wal", "-shm"):
        (path.parent / f"journal.previous.db{suffix}").write_text("older still")
    start_over(path)
    assert read(path) == (FleetRecord(fleet_epoch=4, first_sequence=12), [])
    assert sorted(file.name for file in path.parent.iterdir()) == ["journal.db", "journal.previous.db"]
    assert read(previous(path)) == (FleetRecord(fleet_epoch=4), ["actor", "critic"])


def test_a_fleet_that_is_started_over_twice_before_it_has_a_version_keeps_its_numbers(path: Path) -> None:
    write(path, ModelRecord(name="actor", first_sequence=12), epoch=5, first_sequence=12)
    start_over(path)
    assert read(path)[0] == FleetRecord(fleet_epoch=5, first_sequence=12)


def test_a_journal_that_is_held_or_damaged_is_left_as_it_is(path: Path) -> None:
    write(path)
    holder = SqliteJournal(path)
    with pytest.raises(RlctlError) as caught:
        start_over(path)
    assert caught.value.reason is Reason.JOURNAL_FAILED
    holder.close()
    assert read(path)[0].fleet_epoch == 4
    put(path, Put("model", "actor", b"\xff"))
    before = path.read_bytes()
    with pytest.raises(RlctlError, match="model record 'actor' is damaged"):
        start_over(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["journal.db"]


def test_without_a_journal_nothing_happens(path: Path) -> None:
    start_over(path)
    assert list(path.parent.iterdir()) == []
