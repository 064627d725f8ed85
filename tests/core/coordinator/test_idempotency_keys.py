"""Keys of callers' own: one request_id for each, whoever asks, for as long as it is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.coordinator.operations.idempotency_keys import Keys
from rlctl.ports import Delete, Put, SystemClock

BODY, OTHER = b"a" * 32, b"b" * 32


class Clock(SystemClock):
    """No two of its ids are of the same millisecond."""

    def __init__(self) -> None:
        self._made = 0

    def new_id(self) -> str:
        self._made += 1
        return f"00000000-{self._made:04x}-7000-8000-000000000000"


CLOCK = Clock()


class Gated(SqliteJournal):
    """Writes when it is let, or fails."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.let = asyncio.Event()
        self.let.set()
        self.writes = 0
        self.broken = False

    async def write(self, changes: list[Put | Delete]) -> None:  # type: ignore[override]
        self.writes += 1
        await self.let.wait()
        if self.broken:
            raise Reason.JOURNAL_FAILED.error("the disk is full")
        await super().write(changes)


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Gated]:
    journal = Gated(tmp_path / "journal")
    yield journal
    journal.close()


async def test_calls_side_by_side_get_one_id_and_one_record(journal: Gated) -> None:
    keys = Keys(journal, CLOCK.new_id)
    journal.let.clear()
    calls = [asyncio.create_task(keys.reserve("one", BODY)) for _ in range(3)]
    another = asyncio.create_task(keys.reserve("one", OTHER))
    await asyncio.sleep(0)
    calls[0].cancel()
    journal.let.set()
    first, *others = await asyncio.gather(*calls, another, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert others[0] == others[1]
    assert isinstance(others[2], RlctlError)
    assert others[2].reason is Reason.REQUEST_ID_REUSED
    assert journal.writes == 1


async def test_what_could_not_be_written_is_not_remembered(journal: Gated) -> None:
    keys = Keys(journal, CLOCK.new_id)
    journal.broken = True
    with pytest.raises(RlctlError, match="disk is full"):
        await keys.reserve("one", BODY)
    journal.broken = False
    assert await keys.reserve("one", OTHER) == await keys.reserve("one", OTHER)


async def test_the_oldest_are_forgotten_there_and_in_the_journal(journal: Gated) -> None:
    keys = Keys(journal, CLOCK.new_id, retained=3)
    ids = {name: await keys.reserve(name, BODY) for name in "abcd"}
    more = await asyncio.gather(*(keys.reserve(name, BODY) for name in "ef"))
    assert [key for key, _ in journal.read("key")] == ["d", "e", "f"]
    later = Keys(journal, CLOCK.new_id, retained=3)
    later.load()
    assert [await later.reserve(name, BODY) for name in "def"] == [ids["d"], *more]
    assert await later.reserve("a", OTHER) != ids["a"], "it is a new one"
    assert [key for key, _ in journal.read("key")] == ["a", "e", "f"]
