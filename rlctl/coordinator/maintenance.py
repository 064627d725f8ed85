"""Journals while no coordinator runs: verify, restore, compact.

A journal is sound if a coordinator can load the file. The code of the coordinator's start decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.journal import files
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.coordinator.journal.start_over import read_reached
from rlctl.coordinator.operations.operations import RETAINED
from rlctl.coordinator.service import Coordinator
from rlctl.ports import Link, Put, SystemClock
from rlctl.v1.control_pb2 import ControlRequest, ControlResponse
from rlctl.v1.journal_pb2 import FleetRecord, ModelRecord

KINDS = ("fleet", "slot", "admitted", "model", "pause", "update", "operation", "forgotten", "key", "audit")


AUDIT_KEPT_S = 1e11
"""Longer than any lifetime of audit records. The journal does not contain the lifetime."""


@dataclass(frozen=True)
class Contents:
    """Content of a sound journal.

    Attributes:
        size: bytes of the file, without the log.
        epoch: epoch of the last coordinator of the journal.
        records: number of records by kind.
        versions: published version of each model, as LABEL#SEQUENCE.
        newest: id of the newest operation; "": no operations.
    """

    size: int
    epoch: int
    records: dict[str, int]
    versions: dict[str, str]
    newest: str


def verify(path: Path) -> Contents:
    """Check every page of a journal, and load a copy as a coordinator does at the start. Writes nothing to the journal.

    Raises JOURNAL_FAILED if the journal is missing, damaged or in use.
    """
    if not path.exists():
        raise files.missing(path)
    with tempfile.TemporaryDirectory(prefix="rlctl-journal-") as directory:
        copied = Path(directory) / path.name
        files.copy(path, copied)
        files.check_pages(copied)
        journal = SqliteJournal(copied)
        try:
            records = {kind: len(list(journal.read(kind))) for kind in KINDS}
            newest = max((key for key, _ in journal.read("operation")), default="")
            coordinator = asyncio.run(_loaded(journal))
        finally:
            journal.close()
    versions = {name: model.record.latest for name, model in coordinator.roster.models.items()}
    return Contents(
        size=path.stat().st_size,
        epoch=coordinator.roster.epoch - 1,
        records=records,
        versions={name: f"{version.label}#{version.sequence}" for name, version in sorted(versions.items())},
        newest=newest,
    )


def restore(backup: Path, path: Path) -> Path | None:
    """Replace a journal by a verified copy of a backup. Returns the path of the old file, if there is any.

    Numbers never decrease: epoch and sequences continue from a readable old file. Ids of operations older
    than now are refused unless they are on record. Raises JOURNAL_FAILED, without a change, if the backup is not sound
    or a coordinator has the journal open.
    """
    verify(backup)
    reached = FleetRecord()
    if path.exists():
        files.refuse_used(path)
        with contextlib.suppress(RlctlError):  # backups also replace damaged files
            reached = read_reached(path)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        files.copy(backup, draft)
        _raise_numbers(draft, reached)
        return files.replace(path, draft)
    finally:
        draft.unlink(missing_ok=True)


def compact(path: Path, *, retained: int = RETAINED) -> tuple[int, int, int]:
    """Drop the operations that a coordinator would drop, and free the space of deleted records.

    Returns (dropped operations, bytes before, bytes after). Raises JOURNAL_FAILED if the journal is missing, damaged or
    in use.
    """
    if not path.exists():
        raise files.missing(path)
    journal = SqliteJournal(path)
    try:
        before = path.stat().st_size
        dropped = asyncio.run(_dropped(journal, retained))
        journal.vacuum()
    finally:
        journal.close()
    return dropped, before, path.stat().st_size


async def _loaded(journal: SqliteJournal, retained: int = RETAINED) -> Coordinator:
    """Return a coordinator with the content of a journal, without links to stages."""
    coordinator = Coordinator(journal, _NoDialer(), SystemClock(), retained=retained, audit_kept_s=AUDIT_KEPT_S)
    await coordinator.load()
    return coordinator


async def _dropped(journal: SqliteJournal, retained: int) -> int:
    return await (await _loaded(journal, retained)).operations.drop_expired()


def _raise_numbers(path: Path, reached: FleetRecord) -> None:
    journal = SqliteJournal(path)
    try:
        fleet = FleetRecord()
        for _, body in journal.read("fleet"):
            fleet = FleetRecord.FromString(body)
        fleet.fleet_epoch = max(fleet.fleet_epoch, reached.fleet_epoch)
        fleet.first_sequence = max(fleet.first_sequence, reached.first_sequence)
        forgotten = max([SystemClock().new_id(), *(body.decode() for _, body in journal.read("forgotten"))])
        puts = [Put("fleet", "", fleet.SerializeToString()), Put("forgotten", "", forgotten.encode())]
        for name, body in journal.read("model"):
            model = ModelRecord.FromString(body)
            model.reserved_sequence = max(model.reserved_sequence, reached.first_sequence - 1)
            puts.append(Put("model", name, model.SerializeToString()))
        asyncio.run(journal.write(puts))
    finally:
        journal.close()


class _NoDialer:
    """Opens no connection."""

    async def dial(self, address: str) -> Link[ControlRequest, ControlResponse]:
        raise Reason.UNREACHABLE.error(f"nothing is sent to {address} from here")
