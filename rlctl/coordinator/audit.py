"""The audit: changes and denied calls, with callers. The audit outlasts the record of operations."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.errors import RlctlError
from rlctl.coordinator.journal.records import parsed
from rlctl.ports import Clock, Delete, Journal, Put
from rlctl.v1.coordinator_pb2 import AuditRecord, ListAuditRecordsRequest
from rlctl.v1.results_pb2 import Operation

log = logging.getLogger(__name__)

KIND = "audit"

MOST = 100_000
"""Most records, about 25 MB."""

MOST_DENIALS = 10_000
"""Most records of denied calls, so that callers without any right cannot displace changes."""

KEPT_S = 90 * 86_400.0
"""Lifetime of a record, in seconds."""

EXPIRED_AT_ONCE = 2
"""Most records that a new record drops because of their age. A wall clock that is years ahead for a while would
otherwise clear the audit.
"""

MOST_SLOTS = 16
"""Most slots that a record names."""


class Audit:
    """The records, oldest first. The journal write of an operation's end includes the audit record."""

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        kept_s: float = KEPT_S,
        most: int = MOST,
        most_denials: int = MOST_DENIALS,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._kept_ns = round(kept_s * 1e9)
        self._most = most
        self._most_denials = most_denials
        self._records: dict[str, bytes] = {}
        """By key, oldest first. A key begins with the time. Bytes take a fifth of the memory of messages."""
        self._denials: dict[str, None] = {}
        """Keys of the records of denied calls, oldest first."""

    def load(self) -> None:
        self._records = dict(self._journal.read(KIND))
        records = ((key, parsed(KIND, key, body, AuditRecord)) for key, body in self._records.items())
        self._denials = dict.fromkeys(key for key, record in records if record.denied)

    def ended(self, operation: Operation) -> list[Put | Delete]:
        """Add the record of an ended operation. Returns the changes to journal.

        A step of an update has no record of its own: the update has the record.
        """
        if operation.update_id not in ("", operation.operation_id):
            return []
        record = AuditRecord(
            time=operation.done_time,
            caller=operation.caller,
            method=operation.verb,
            state=operation.state,
            reason=operation.error.reason,
            operation_id=operation.operation_id,
            model=operation.model,
            adapter=operation.adapter,
            weight_version=operation.weight_version if operation.HasField("weight_version") else None,
            targets=len(operation.targets),
            slots=operation.targets[:MOST_SLOTS],
        )
        return self._add(record, operation.operation_id)

    async def record(self, record: AuditRecord) -> None:
        """Add a record of the present time. Logs a failure of the journal."""
        record.time.CopyFrom(self._clock.wall())
        try:
            await self._journal.write(self._add(record, self._clock.new_id()))
        except RlctlError as error:
            log.warning("%s of %s is not in the audit: %s", record.method, record.caller.principal, error)

    def newest_first(self, request: ListAuditRecordsRequest) -> Iterator[tuple[str, AuditRecord]]:
        """Yield the records that a request selects, with keys, by their time: the wall clock may have been set."""
        since = request.since.ToNanoseconds() if request.HasField("since") else 0
        for key in sorted(self._records, reverse=True):
            if request.page_token and key >= request.page_token:
                continue
            record = parsed(KIND, key, self._records[key], AuditRecord)
            if record.time.ToNanoseconds() < since:
                return
            if request.principal in ("", record.caller.principal) and (record.denied or not request.denied):
                yield key, record

    def _add(self, record: AuditRecord, unique: str) -> list[Put | Delete]:
        key = f"{record.time.ToNanoseconds():020d}-{unique}"
        body = record.SerializeToString()
        self._records[key] = body
        if record.denied:
            self._denials[key] = None
        return [Put(KIND, key, body), *self._expired(record.time)]

    def _expired(self, now: Timestamp) -> Iterator[Delete]:
        oldest = f"{max(0, now.ToNanoseconds() - self._kept_ns):020d}"
        for key in list(itertools.islice(self._records, EXPIRED_AT_ONCE)):
            if key < oldest:
                yield self._drop(key)
        while len(self._denials) > self._most_denials:
            yield self._drop(next(iter(self._denials)))
        while len(self._records) > self._most:  # denials first
            yield self._drop(next(iter(self._denials or self._records)))

    def _drop(self, key: str) -> Delete:
        del self._records[key]
        self._denials.pop(key, None)
        return Delete(KIND, key)
