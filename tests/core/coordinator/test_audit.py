"""Records of the audit: what is kept, for how long, and in which order they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.errors import Reason
from rlctl.coordinator.audit import Audit
from rlctl.ports import Delete, Put
from rlctl.v1.common_pb2 import Caller
from rlctl.v1.coordinator_pb2 import AuditRecord, ListAuditRecordsRequest
from rlctl.v1.results_pb2 import OPERATION_STATE_OK, Operation


class Journal:
    def __init__(self) -> None:
        self.records: dict[tuple[str, str], bytes] = {}
        self.full = False

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        if self.full:
            raise Reason.JOURNAL_FAILED.error("the disk is full")
        self.take(changes)

    def take(self, changes: Sequence[Put | Delete]) -> None:
        for change in changes:
            if isinstance(change, Put):
                self.records[change.kind, change.key] = change.body
            else:
                del self.records[change.kind, change.key]

    def read(self, kind: str) -> Iterable[tuple[str, bytes]]:
        return sorted((key, body) for (of, key), body in self.records.items() if of == kind)


class Clock:
    def __init__(self) -> None:
        self.second = 1000
        self._ids = count()

    def wall(self) -> Timestamp:
        return Timestamp(seconds=self.second)

    def new_id(self) -> str:
        return f"id-{next(self._ids)}"


def audit_of(journal: Journal, clock: Clock, **limits: Any) -> Audit:
    return Audit(journal, clock, **limits)  # type: ignore[arg-type]


def operation(number: int, **fields: Any) -> Operation:
    caller = Caller(principal=fields.pop("principal", "ci"))
    time = Timestamp(seconds=1000 + number)
    return Operation(operation_id=f"op-{number}", caller=caller, state=OPERATION_STATE_OK, done_time=time, **fields)


def ids(audit: Audit, **wanted: Any) -> list[str]:
    return [record.operation_id for _, record in audit.newest_first(ListAuditRecordsRequest(**wanted))]


async def test_records_are_read_newest_first_and_survive_a_restart() -> None:
    journal, clock = Journal(), Clock()
    audit = audit_of(journal, clock)
    for number in range(5):
        journal.take(audit.ended(operation(number, principal="ci" if number % 2 else "bob")))
    clock.second = 2000
    await audit.record(AuditRecord(method="AdmitSlots", operation_id="last", denied=True))
    again = audit_of(journal, clock)
    again.load()
    for each in (audit, again):
        assert ids(each) == ["last", "op-4", "op-3", "op-2", "op-1", "op-0"]
        assert ids(each, principal="ci") == ["op-3", "op-1"]
        assert ids(each, denied=True) == ["last"]
        assert ids(each, since=Timestamp(seconds=1003)) == ["last", "op-4", "op-3"]
        keys = [key for key, _ in each.newest_first(ListAuditRecordsRequest())]
        assert ids(each, page_token=keys[3]) == ["op-1", "op-0"]


def test_a_step_of_an_update_belongs_to_the_update() -> None:
    audit = audit_of(Journal(), Clock())
    assert audit.ended(operation(1, update_id="op-1"))
    assert not audit.ended(operation(2, update_id="op-1"))
    assert ids(audit) == ["op-1"]


def test_an_end_that_is_recorded_twice_is_one_record() -> None:
    journal = Journal()
    audit = audit_of(journal, Clock())
    for _ in range(2):
        journal.take(audit.ended(operation(1)))
    assert ids(audit) == ["op-1"]
    assert len(journal.records) == 1


def test_old_records_and_those_above_the_limit_are_dropped() -> None:
    journal = Journal()
    audit = audit_of(journal, Clock(), kept_s=10.0, most=5)
    for number in range(8):
        journal.take(audit.ended(operation(number)))
    assert ids(audit) == [f"op-{number}" for number in (7, 6, 5, 4, 3)]
    journal.take(audit.ended(operation(15)))
    assert ids(audit) == ["op-15", "op-7", "op-6", "op-5"]
    assert len(journal.records) == 4


def test_a_clock_that_is_ahead_for_a_while_does_not_clear_the_audit() -> None:
    journal = Journal()
    audit = audit_of(journal, Clock(), kept_s=100.0)
    for number in range(20):
        journal.take(audit.ended(operation(number)))
    journal.take(audit.ended(operation(10**6)))
    assert len(ids(audit)) == 19, "two of the oldest are gone, as after any record"
    journal.take(audit.ended(operation(30)))
    assert len(ids(audit)) == 20
    again = audit_of(journal, Clock(), kept_s=100.0)
    again.load()
    for each in (audit, again):
        assert ids(each)[:3] == ["op-1000000", "op-30", "op-19"], "by time"
        assert ids(each, since=Timestamp(seconds=1019)) == ["op-1000000", "op-30", "op-19"]
        token, _ = next(each.newest_first(ListAuditRecordsRequest()))
        assert ids(each, page_token=token)[0] == "op-30", "pages leave nothing out"


async def test_a_full_disk_costs_the_record_and_not_the_call() -> None:
    journal = Journal()
    journal.full = True
    audit = audit_of(journal, Clock())
    await audit.record(AuditRecord(method="AdmitSlots"))
    assert len(ids(audit)) == 1, "it is shown until the coordinator ends"


async def test_denials_push_no_changes_out() -> None:
    journal, clock = Journal(), Clock()
    audit = audit_of(journal, clock, most=6, most_denials=3)
    for number in range(3):
        journal.take(audit.ended(operation(number)))
    for number in range(10):
        clock.second = 1100 + number
        await audit.record(AuditRecord(method="GetFleet", operation_id=f"denied-{number}", denied=True))
    assert ids(audit) == ["denied-9", "denied-8", "denied-7", "op-2", "op-1", "op-0"]
    again = audit_of(journal, clock, most=6, most_denials=3)
    again.load()
    for number in range(5):
        journal.take(again.ended(operation(200 + number)))
    changes = [f"op-{number}" for number in (204, 203, 202, 201, 200, 2)]
    assert ids(again) == changes, "denials are dropped first"
    assert len(journal.records) == len(changes)
