"""The Journal port: records in memory that survive the process, writes that take time, fail, or are lost with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from rlctl.contract.errors import Reason
from rlctl.ports import Delete, Put
from tests.simulator.ports.virtual_time import Node

Watch = Callable[[Put | Delete], None]
Refuses = Callable[[Sequence[Put | Delete]], bool]


class Store:
    """The content of the disk.

    Attributes:
        holder: the process whose writes count: the last process to open the store.
        full: the disk refuses every write.
        refuses: returns True to refuse these changes.
        detached: a write goes on when its caller is cancelled, as with SQLite's thread.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], bytes] = {}
        self.holder: SimJournal | None = None
        self.full = False
        self.refuses: Refuses = lambda _: False
        self.detached = False
        self.watch: Watch = lambda _: None


class SimJournal:
    """A store opened by one process."""

    def __init__(self, store: Store, node: Node) -> None:
        self._store = store
        self._node = node
        self._last: asyncio.Lock = asyncio.Lock()
        store.holder = self

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        """Make all changes durable, or no change. Raises JOURNAL_FAILED if nothing was written."""
        if self._store.detached:
            await asyncio.shield(asyncio.ensure_future(self._write(changes)))
        else:
            await self._write(changes)

    async def _write(self, changes: Sequence[Put | Delete]) -> None:
        async with self._last:
            await asyncio.sleep(self._node.random.expovariate(1 / 0.003))
            if self._store.full or self._store.refuses(changes):
                raise Reason.JOURNAL_FAILED.error("the disk is full")
            if self._store.holder is not self:
                raise Reason.JOURNAL_FAILED.error("another process holds the journal")
            for change in changes:
                if isinstance(change, Put):
                    self._store.records[change.kind, change.key] = change.body
                else:
                    self._store.records.pop((change.kind, change.key), None)
                self._store.watch(change)
        # The process may die between the write and its own next step.
        await asyncio.sleep(0)

    def owned(self) -> bool:
        """Return True if no other process has opened the store since."""
        return self._store.holder is self

    def read(self, kind: str) -> Iterable[tuple[str, bytes]]:
        """Return every record of a kind, in key order."""
        return [(key, body) for (k, key), body in sorted(self._store.records.items()) if k == kind]
