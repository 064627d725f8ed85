"""Faults of the coordinator's journal: a full disk, and events around one write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rlctl.contract.errors import Reason
from rlctl.ports import Put
from rlctl.testing.in_process_fleet import InProcessFleet


@asynccontextmanager
async def full_disk(fleet: InProcessFleet, kind: str = "") -> AsyncIterator[None]:
    """Let the journal refuse every write, or every record of a kind."""
    journal = fleet.server.coordinator._journal
    write_through = journal.write

    async def refuse(changes: Sequence[Any]) -> None:
        if not kind or any(isinstance(change, Put) and change.kind == kind for change in changes):
            raise Reason.JOURNAL_FAILED.error("no space is left")
        await write_through(changes)

    journal.write = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        journal.write = write_through  # type: ignore[method-assign]


MEANWHILE_S = 0.3
"""Time for other work before a record is written; shorter than the waits for the record."""


@asynccontextmanager
async def at_write(
    fleet: InProcessFleet, which: Callable[[Put], bool], *, before: Any = None, after: Any = None
) -> AsyncIterator[None]:
    """Run coroutines around one write of a matching record: before the write, and before its writer continues."""
    journal = fleet.server.coordinator._journal
    write_through = journal.write
    left = [True]

    async def write(changes: Sequence[Any]) -> None:
        chosen = left and any(isinstance(change, Put) and which(change) for change in changes)
        if chosen:
            left.clear()
        if chosen and before is not None:
            await before()
        await write_through(changes)
        if chosen and after is not None:
            await after()

    journal.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        journal.write = write_through  # type: ignore[method-assign]
    assert not left, "no such record was written"
