"""Starts a fleet over: puts the journal aside, and continues epoch and sequences."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from pathlib import Path

from rlctl.contract.errors import Reason
from rlctl.coordinator.journal.records import parsed
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.ports import Put
from rlctl.runtime import private_files
from rlctl.v1.journal_pb2 import FleetRecord, ModelRecord


def previous(path: Path) -> Path:
    """Return the path of a journal that was put aside: ``journal.previous.db`` beside ``journal.db``."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def start_over(path: Path) -> None:
    """Put a journal aside as :func:`previous`, over an earlier file. Without a journal nothing happens.

    The new journal holds only the epoch and the first free sequence. Stages that outlive the fleet obey no lower epoch,
    and a sequence never names two versions.

    Raises JOURNAL_FAILED, without a change, if another coordinator holds the journal or the journal is damaged.
    """
    if not path.exists():
        return
    reached = read_reached(path)
    wal = path.with_name(f"{path.name}-wal")
    if wal.exists():
        raise Reason.JOURNAL_FAILED.error(f"journal {path}: {wal.name} is still in use")
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        asyncio.run(_begin(draft, reached))
        backup = previous(path)
        for suffix in ("", "-wal", "-shm"):
            backup.with_name(backup.name + suffix).unlink(missing_ok=True)
        os.link(path, backup)  # a journal of this name exists at every moment, even if this process dies
        private_files.put_in_place(draft, path)
    except OSError as error:
        raise Reason.JOURNAL_FAILED.error(f"journal {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


async def _begin(path: Path, reached: FleetRecord) -> None:
    journal = SqliteJournal(path)
    try:
        await journal.write([Put("fleet", "", reached.SerializeToString())])
    finally:
        journal.close()


def read_reached(path: Path) -> FleetRecord:
    """Return the epoch and the first free sequence of a journal, as the first record of the next journal."""
    reached = FleetRecord()
    journal = SqliteJournal(path)
    try:
        for key, body in journal.read("fleet"):
            reached = parsed("fleet", key, body, FleetRecord)
        for key, body in journal.read("model"):
            model = parsed("model", key, body, ModelRecord)
            last = max(model.reserved_sequence, model.latest.sequence)
            reached.first_sequence = max(reached.first_sequence, last + 1)
    finally:
        journal.close()
    return reached
