"""The journal in SQLite: write-ahead log, every write synchronised to disk, a single writer thread, grouped writes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.journal import records
from rlctl.ports import Delete, Put
from rlctl.runtime import private_files

MIGRATIONS = (
    "CREATE TABLE record (kind TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (kind, key))",
)
"""Each statement migrates the previous schema. A new file runs all statements. Append only."""

LOCK_S = 0.5
"""Wait for a coordinator that is just ending and releases the file."""

NEXT_STEP = "Make the file writable and its disk big enough."
LOCKED = "Stop the coordinator that uses it, or give this one a journal of its own."
DAMAGED = f"Nothing was changed. {records.NEXT_STEP}"

MOVED = "Start a coordinator on the file that holds the fleet's records."

_COMMAND_SHOWN = 200
"""Characters of a process's command line in an error."""

COPIED_AT_ONCE = 256
"""Pages that a copy reads before letting a write of the coordinator through."""

COPY_PAUSE_S = 0.001

_FAILURES = (sqlite3.Error, MemoryError)
"""Errors of a call of SQLite: Python raises MemoryError for SQLITE_NOMEM."""

_Write = tuple[Sequence[Put | Delete], asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class SqliteJournal:
    """A journal in a file, locked while open.

    Writes that arrive during a synchronisation go to disk together with the next write.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the file, or make a new file. Raises JOURNAL_FAILED with the cause.

        An unreadable file is kept unchanged, and never treated as a fleet without records.
        """
        self._path = Path(path)
        self._name = os.fspath(self._path)
        # Each writer waits for its write, so operations and calls under way bound the queue.
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._copying = threading.Lock()
        self._closed = False
        try:
            private_files.make_directory(self._path.parent)
            if not self._path.exists():
                self._make()
            self._connection = self._open()
            self._file = self._identity()
        except (OSError, *_FAILURES) as error:
            raise self._failed(_cause(error)) from error
        self._thread = threading.Thread(target=self._serve, name="journal", daemon=True)
        self._thread.start()

    def _make(self) -> None:
        """Give a new journal its name only when complete. An empty file is therefore always a loss of records."""
        if self._beside("-wal").exists():
            raise self._failed(f"the file is gone, but {self._beside('-wal').name} has records of it", DAMAGED)
        draft = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex}")
        try:
            private_files.write_text(draft, "")  # SQLite would make a file that other users can read
            with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as connection:
                self._migrate(connection, 0)
            with contextlib.suppress(FileExistsError):  # another coordinator was first
                os.link(draft, self._path)
            private_files.sync_directory(self._path.parent)
        finally:
            draft.unlink(missing_ok=True)

    def _open(self) -> sqlite3.Connection:
        # A URI, because sqlite3.connect(path) makes a missing file.
        for suffix in ("", "-wal", "-shm"):
            private_files.tighten(self._beside(suffix))
        uri = f"{self._path.absolute().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, LOCK_S, uri=True, check_same_thread=False, isolation_level=None)
        try:
            schema = self._inspect(connection)
            run = connection.execute
            run("PRAGMA locking_mode = EXCLUSIVE")
            run("PRAGMA journal_mode = WAL")
            run("PRAGMA synchronous = FULL")
            run("BEGIN EXCLUSIVE")
            run("COMMIT")
            self._migrate(connection, schema)
        except sqlite3.DatabaseError as error:
            connection.close()
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise self._failed(f"it is locked{lock_holder(self._path)}", LOCKED) from error
            damaged = not isinstance(error, sqlite3.OperationalError)
            raise self._failed(str(error), DAMAGED if damaged else NEXT_STEP) from error
        except (RlctlError, MemoryError):
            connection.close()
            raise
        return connection

    def _inspect(self, connection: sqlite3.Connection) -> int:
        """Return the schema of a sound file, without changing the file."""
        (schema,) = connection.execute("PRAGMA user_version").fetchone()
        if not schema:
            raise self._failed("it is empty, or was not written by rlctl", DAMAGED)
        if schema > len(MIGRATIONS):
            cause = f"it has schema {schema}, this version writes {len(MIGRATIONS)}"
            raise self._failed(cause, "Start the version of rlctl that wrote it, or a newer one.")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise self._failed(f"it is damaged: {verdict.splitlines()[-1]}", DAMAGED)
        return int(schema)

    def _migrate(self, connection: sqlite3.Connection, schema: int) -> None:
        """Migrate a file from ``schema`` to the present schema, in a single transaction."""
        if schema == len(MIGRATIONS):
            return
        connection.execute("BEGIN EXCLUSIVE")
        try:
            for statement in MIGRATIONS[schema:]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def _beside(self, suffix: str) -> Path:
        return self._path.with_name(self._path.name + suffix)

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        """Make the changes durable, all or nothing. Raises JOURNAL_FAILED."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        with self._closing:
            if self._closed:
                raise self._failed("it is closed")
            self._queue.put((changes, loop, done))
        await asyncio.shield(done)

    def read(self, kind: str) -> Iterable[tuple[str, bytes]]:
        """Return every record of a kind, in key order."""
        try:
            rows = self._connection.execute("SELECT key, body FROM record WHERE kind = ? ORDER BY key", (kind,))
            return rows.fetchall()
        except _FAILURES as error:
            raise self._failed(_cause(error)) from error

    def copy(self, target: Path) -> None:
        """Copy the journal into a new file, from any thread. Raises JOURNAL_FAILED.

        Writes continue meanwhile. The copy has each write that ends before the copy begins.
        """
        with self._copying:
            if self._closed:
                raise self._failed("it is closed")
            try:
                copy_database(self._connection, target)
            except (OSError, *_FAILURES) as error:
                raise self._failed(f"it cannot be copied to {target}: {_cause(error)}") from error

    def vacuum(self) -> None:
        """Free the space of deleted records. Raises JOURNAL_FAILED."""
        try:
            self._connection.execute("VACUUM")
        except _FAILURES as error:
            raise self._failed(_cause(error)) from error

    def owned(self) -> bool:
        """Whether the locked file still has the journal's name. A moved file may have a successor."""
        try:
            return self._identity() == self._file
        except OSError:
            return False

    def _identity(self) -> tuple[int, int]:
        status = os.stat(self._name)  # a string is fast: checked before every send
        return status.st_dev, status.st_ino

    def close(self) -> None:
        """Write the queued changes, then close the file."""
        with self._closing:
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        with self._copying:
            self._connection.close()

    def _serve(self) -> None:
        stopping = False
        while not stopping:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._queue.get_nowait())
            stopping = None in batch
            writes = [write for write in batch if write is not None]
            if writes:
                error = self._commit(writes)
                for _, loop, done in writes:
                    # A closed loop needs no result.
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(_settle, done, error)

    def _commit(self, writes: Sequence[_Write]) -> RlctlError | None:
        if not self.owned():  # a write to a moved file would be reported as durable, and lost
            return self._failed("the file was moved or replaced", MOVED)
        run = self._connection.execute
        try:
            run("BEGIN IMMEDIATE")
            for changes, _, _ in writes:
                for change in changes:
                    if isinstance(change, Put):
                        values = (change.kind, change.key, change.body)
                        run("INSERT OR REPLACE INTO record (kind, key, body) VALUES (?, ?, ?)", values)
                    else:
                        run("DELETE FROM record WHERE kind = ? AND key = ?", (change.kind, change.key))
            run("COMMIT")
        except Exception as error:  # noqa: BLE001 - a writer waits for each write, and the thread must go on
            with contextlib.suppress(*_FAILURES):
                run("ROLLBACK")
            return self._failed(_cause(error))
        return None

    def _failed(self, why: str, next_step: str = NEXT_STEP) -> RlctlError:
        return Reason.JOURNAL_FAILED.error(f"journal {self._path}: {why}", next_step=next_step)


def copy_database(source: sqlite3.Connection, target: Path) -> None:
    """Copy a database page by page into a new file that needs no log beside it. Raises OSError, sqlite3.Error."""
    private_files.write_text(target, "")
    with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as copy:
        source.backup(copy, pages=COPIED_AT_ONCE, sleep=COPY_PAUSE_S)
        copy.execute("PRAGMA journal_mode = DELETE")


def lock_holder(path: Path) -> str:
    """Describe the process that has locked a file, for an error: " by process 4711 (rlctl coordinator)".

    Empty if the kernel does not list locks, or if the process has a different host or namespace.
    """
    try:
        inode = str(path.stat().st_ino)
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        # 1: POSIX  ADVISORY  WRITE 4711 fe:00:2270947 0 EOF
        pid = next(words[4] for words in locks if words[1] == "POSIX" and words[5].rpartition(":")[2] == inode)
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (OSError, StopIteration, IndexError):
        return ""
    return f" by process {pid} ({command[:_COMMAND_SHOWN]})"


def _cause(error: Exception) -> str:
    return "out of memory" if isinstance(error, MemoryError) else str(error)


def _settle(done: asyncio.Future[None], error: RlctlError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
