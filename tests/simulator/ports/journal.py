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
    """What is on the disk.

    Attributes:
        holder: the process whose writes count: the one that opened it last.
        full: it takes nothing.
        refuses: whether it does not take just these changes.
        detached: a write goes on when whoever asked for it is cancelled, as with SQLite's thread.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], bytes] = {}
        self.holder: SimJournal | None = None
        self.full = False
        self.refuses: Refuses = lambda _: False
        self.detached = False
        self.watch: Watch = lambda _: None


class SimJournal:
    """A store as one process has opened it."""

    def __init__(self, store: Store, node: Node) -> None:
        self._store = store
        self._node = node
        self._last: asyncio.Lock = asyncio.Lock()
        store.holder = self

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        """Make the changes durable, all or none. Raises JOURNAL_FAILED; then nothing was written."""
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
        # The process may die between the disk's word and its own next step.
        await asyncio.sleep(0)

    def held(self) -> bool:
        """Whether no other process has opened the store since."""
        return self._store.holder is self

    def read(self, kind: str) -> Iterable[tuple[str, bytes]]:
        """Every record of a kind, in key order."""
        return [(key, body) for (k, key), body in sorted(self._store.records.items()) if k == kind]
