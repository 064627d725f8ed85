"""Idempotency keys of HTTP callers: each key names a request id, at every gateway.

The time in a request id, a UUIDv7, tells whether the id is older than all remembered operations. A key has no time. So
the coordinator makes a request id for each new key and keeps it in the journal. All gateways, before and after a
restart, then mean the same operation. A forgotten key is a new key.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from rlctl.contract.errors import Reason
from rlctl.coordinator.journal.records import parsed
from rlctl.ports import Delete, Journal, Put
from rlctl.v1.journal_pb2 import KeyRecord

RETAINED = 50_000
"""Number of keys that are kept: more than operations, since a key may belong to several operations or to no operation.
"""


class Keys:
    """The keys, by name."""

    def __init__(self, journal: Journal, new_id: Callable[[], str], retained: int = RETAINED) -> None:
        self._journal = journal
        self._new_id = new_id
        self._retained = retained
        self._records: dict[str, KeyRecord] = {}
        """Oldest first."""
        self._writing: dict[str, asyncio.Task[None]] = {}

    def load(self) -> None:
        records = [(key, parsed("key", key, body, KeyRecord)) for key, body in self._journal.read("key")]
        self._records = dict(sorted(records, key=lambda each: each[1].request_id))

    async def reserve(self, key: str, body_sha256: bytes) -> str:
        """Return the request id of a key. Raises REQUEST_ID_REUSED for a second body, JOURNAL_FAILED."""
        if key not in self._records:
            writing = self._writing.get(key)
            if writing is None:
                writing = self._writing[key] = asyncio.create_task(self._remember(key, body_sha256))
            await asyncio.shield(writing)  # other waiting callers continue if this caller disconnects
        record = self._records[key]
        if record.body_sha256 != body_sha256:
            raise Reason.REQUEST_ID_REUSED.error("the key was used for another request", field="key")
        return record.request_id

    async def _remember(self, key: str, body_sha256: bytes) -> None:
        record = KeyRecord(request_id=self._new_id(), body_sha256=body_sha256)
        surplus = len(self._records) + len(self._writing) - self._retained
        forgotten = list(itertools.islice(self._records, max(0, surplus)))
        try:
            await self._journal.write(
                [Put("key", key, record.SerializeToString()), *(Delete("key", old_key) for old_key in forgotten)]
            )
            self._records[key] = record
            for old_key in forgotten:
                self._records.pop(old_key, None)
        finally:
            del self._writing[key]
