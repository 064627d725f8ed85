"""The journal in SQLite: write-ahead log, every write synchronised to disk, one writer thread, writes grouped."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlctl.errors import Reason, RlctlError
from rlctl.ports import Delete, Put

SCHEMA_VERSION = 1

LOCK_S = 0.5
"""How long to wait for a coordinator that is just leaving to let the file go."""

_SCHEMA = "CREATE TABLE record (kind TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (kind, key))"

_Write = tuple[Sequence[Put | Delete], asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class SqliteJournal:
    """A journal in one file, locked for as long as it is open.

    Writes that arrive while one is being synchronised go to disk together with the next one.
    """

    def __init__(self, path: str | Path) -> None:
        """Open or make the file. Raises JOURNAL_FAILED, saying why; what is there is never overwritten."""
        self._path = Path(path)
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self._path, LOCK_S, check_same_thread=False, isolation_level=None)
            self._prepare()
            self._file = self._identity()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(str(error)) from error
        self._thread = threading.Thread(target=self._serve, name="journal", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("BEGIN EXCLUSIVE")
        (found,) = run("PRAGMA user_version").fetchone()
        if found == 0 and not run("SELECT 1 FROM sqlite_master").fetchone():
            run(_SCHEMA)
            run(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif found != SCHEMA_VERSION:
            run("ROLLBACK")
            self._connection.close()
            raise self._failed(f"it has schema {found}, this version writes {SCHEMA_VERSION}")
        run("COMMIT")

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        """Make the changes durable, all or none. Raises JOURNAL_FAILED."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put((changes, loop, done))
        await asyncio.shield(done)

    def read(self, kind: str) -> Iterable[tuple[str, bytes]]:
        """Every record of a kind, in key order."""
        try:
            rows = self._connection.execute("SELECT key, body FROM record WHERE kind = ? ORDER BY key", (kind,))
            return rows.fetchall()
        except sqlite3.Error as error:
            raise self._failed(str(error)) from error

    def held(self) -> bool:
        """Whether the file that is locked is still the one of that name: moved away, it may have a successor."""
        try:
            return self._identity() == self._file
        except OSError:
            return False

    def _identity(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_dev, status.st_ino

    def close(self) -> None:
        """Write what is queued, then close the file."""
        self._queue.put(None)
        self._thread.join()
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
                    # A loop that was closed meanwhile has nobody left to tell.
                    with contextlib.suppress(RuntimeError):
                        loop.call_soon_threadsafe(_settle, done, error)

    def _commit(self, writes: Sequence[_Write]) -> RlctlError | None:
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
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):
                run("ROLLBACK")
            return self._failed(str(error))
        return None

    def _failed(self, why: str) -> RlctlError:
        return Reason.JOURNAL_FAILED.error(
            f"journal {self._path}: {why}",
            next_step="Make the file writable, stop the coordinator that holds it, or name another with --journal.",
        )


def _settle(done: asyncio.Future[None], error: RlctlError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
