"""Copies and replaces journal files that no coordinator has open."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import uuid
from pathlib import Path

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.journal.sqlite import LOCK_S, LOCKED, NEXT_STEP, copy_database, lock_holder
from rlctl.runtime import private_files

IN_USE = "`rlctl journal backup` and `verify` without --journal and --name copy it through its coordinator."


def copy(path: Path, target: Path) -> None:
    """Copy the journal into a new file. The journal and its log stay unchanged. Raises JOURNAL_FAILED.

    A closed journal has no log and is read without locks, because SQLite would leave lock files behind.
    """
    log, index = _beside(path, "-wal"), _beside(path, "-shm")
    closed, index_existed, before = not log.exists(), index.exists(), path.stat()
    try:
        uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if closed else ''}"
        with contextlib.closing(sqlite3.connect(uri, LOCK_S, uri=True, isolation_level=None)) as source:
            source.execute("SELECT count(*) FROM sqlite_master")  # a copy would wait for the lock without limit
            copy_database(source, target)
    except sqlite3.Error as error:
        raise failed(path, error, f"{LOCKED} {IN_USE}") from error
    finally:
        if not closed and not index_existed:
            index.unlink(missing_ok=True)  # coordinators have no such file
    after = path.stat()
    if closed and (log.exists() or (before.st_mtime_ns, before.st_ino) != (after.st_mtime_ns, after.st_ino)):
        raise Reason.JOURNAL_FAILED.error(f"journal {path}: a coordinator has just opened it", next_step=IN_USE)


def check_pages(path: Path) -> None:
    """Check every page, index and constraint of a file. Raises JOURNAL_FAILED, which names the damage."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            findings = [str(row[0]) for row in connection.execute("PRAGMA integrity_check")]
    except sqlite3.Error as error:
        raise failed(path, error) from error
    if findings != ["ok"]:
        raise Reason.JOURNAL_FAILED.error(
            f"journal {path}: it is damaged: {'; '.join(findings)}",
            next_step="`rlctl journal restore BACKUP` puts a backup in its place.",
        )


def replace(path: Path, draft: Path) -> Path | None:
    """Replace a journal by a complete draft. Returns the path of the old journal, kept beside it, if there is an
    old journal.

    Raises JOURNAL_FAILED, without a change, while a coordinator has the journal open.
    """
    if not path.exists():
        private_files.put_in_place(draft, path)
        return None
    readable = refuse_used(path)
    if readable and _beside(path, "-wal").exists():
        raise Reason.JOURNAL_FAILED.error(f"journal {path}: a coordinator has just opened it", next_step=LOCKED)
    backup = path.with_name(f"{path.stem}.before-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:4]}{path.suffix}")
    os.link(path, backup)  # a journal of this name exists at every moment, even if this process dies
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(_beside(path, suffix), _beside(backup, suffix))
    private_files.put_in_place(draft, path)  # a coordinator that has opened the old file meanwhile notices the loss
    return backup


def refuse_as_target(target: Path, source: Path | None) -> None:
    """Refuse to overwrite the journal to copy, or a journal that a coordinator has open.

    ``source``: None where a coordinator sends its journal. Raises FIELD_INVALID, JOURNAL_FAILED.
    """
    if not target.exists():
        return
    cause = ""
    if source is not None and source.exists() and target.samefile(source):
        cause = "is the journal itself"
    elif _beside(target, "-wal").exists():
        cause = f"is a journal in use, or its coordinator was killed: {target.name}-wal is beside it"
    if cause:
        raise Reason.FIELD_INVALID.error(f"{target} {cause}", field="FILE", next_step="Name another file.")
    refuse_used(target)


def refuse_used(path: Path) -> bool:
    """Raise JOURNAL_FAILED while a coordinator has the file open.

    Returns whether SQLite can read the file. The log is then part of the file.
    """
    uri = f"{path.absolute().as_uri()}?mode=rw"
    with contextlib.closing(sqlite3.connect(uri, LOCK_S, uri=True, isolation_level=None)) as connection:
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise failed(path, error) from error
        except sqlite3.DatabaseError:
            return False
    return True


def missing(path: Path) -> RlctlError:
    """Return the error for a journal without a file."""
    return Reason.JOURNAL_FAILED.error(
        f"journal {path}: there is no such file", next_step="Pass the path of the journal."
    )


def failed(path: Path, error: sqlite3.Error, locked: str = LOCKED) -> RlctlError:
    """Return the error of a journal for an error of SQLite."""
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
        return Reason.JOURNAL_FAILED.error(f"journal {path}: it is locked{lock_holder(path)}", next_step=locked)
    return Reason.JOURNAL_FAILED.error(f"journal {path}: {error}", next_step=NEXT_STEP)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
