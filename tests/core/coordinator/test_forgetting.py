"""Operations and slots that are forgotten: what is refused from then on; operations that end at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from waiting import eventually

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.audit import Audit
from rlctl.coordinator.fleet import roster
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.coordinator.operations.operations import RETAINED_BYTES, Operations, page_token
from rlctl.coordinator.operations.run import Run
from rlctl.ports import Delete, Put, SystemClock
from rlctl.v1.common_pb2 import RequestHeader
from rlctl.v1.fleet_pb2 import StageRegistration
from rlctl.v1.journal_pb2 import OperationRecord, SlotRecord
from rlctl.v1.results_pb2 import OPERATION_STATE_CANCELLED
from rlctl.v1.verbs_pb2 import FlushCacheRequest, LoadAdapterRequest


class Clock(SystemClock):
    """No two of its ids are of the same millisecond."""

    def __init__(self) -> None:
        self.made = 0
        self.ahead_s = 0

    def wall(self) -> Timestamp:
        time = super().wall()
        return Timestamp(seconds=time.seconds + self.ahead_s, nanos=time.nanos)

    def new_id(self) -> str:
        self.made += 1
        return f"00000000-{self.made:04x}-7000-8000-{self.made:012x}"


class Memory:
    """A journal that writes when it is let."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], bytes] = {}
        self.let = asyncio.Event()
        self.let.set()

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        await self.let.wait()
        for change in changes:
            if isinstance(change, Put):
                self.records[change.kind, change.key] = change.body
            else:
                self.records.pop((change.kind, change.key), None)

    def read(self, kind: str) -> Iterable[tuple[str, bytes]]:
        return [(key, body) for (k, key), body in self.records.items() if k == kind]

    def owned(self) -> bool:
        return True


CLOCK = Clock()


def operations(journal: Memory, retained: int, retained_bytes: int = RETAINED_BYTES) -> Operations:
    return Operations(journal, Roster(journal, CLOCK), CLOCK, Audit(journal, CLOCK), retained, retained_bytes)


async def begun(operations: Operations, let: asyncio.Event, request_id: str | None = None) -> Run:
    async def work(_: Run) -> None:
        await let.wait()

    request_id = CLOCK.new_id() if request_id is None else request_id
    request = FlushCacheRequest(header=RequestHeader(request_id=request_id))
    return await operations.start(request, verb="FlushCache", targets=[], excluded=[], work=work, exclusive=False)


async def ended(operations: Operations, request_id: str | None = None) -> Run:
    let = asyncio.Event()
    let.set()
    run = await begun(operations, let, request_id)
    await run.ended.wait()
    return run


async def test_operations_that_end_at_the_same_time_forget_the_same_one_once() -> None:
    journal = Memory()
    kept = operations(journal, retained=1)
    first = await ended(kept)
    second = await ended(kept)
    let = asyncio.Event()
    runs = [await begun(kept, let) for _ in range(3)]
    journal.let.clear()
    let.set()
    await eventually(lambda: all(run.operation.HasField("done_time") for run in runs))
    journal.let.set()
    for run in runs:
        assert run.task is not None
        await run.task  # nothing went wrong in it
    last = await ended(kept)
    known = {run.operation.operation_id for run in kept.newest_first("", 0)}
    assert known == {runs[-1].operation.operation_id, last.operation.operation_id}
    assert {key for kind, key in journal.records if kind == "operation"} == known
    for forgotten in (first, second, *runs[:-1]):
        asked = FlushCacheRequest(header=RequestHeader(request_id=forgotten.operation.operation_id))
        with pytest.raises(RlctlError) as refused:
            kept.known(asked.header.request_id, asked)
        assert refused.value.reason is Reason.REQUEST_ID_EXPIRED


async def test_what_is_kept_has_a_bound_in_bytes_too() -> None:
    """One operation may take kilobytes, or hundreds of them: it has a result for every rank of every target."""
    journal = Memory()
    kept = operations(journal, retained=100, retained_bytes=1000)
    runs = [await ended(kept) for _ in range(30)]
    for each in (kept, later := operations(journal, retained=100, retained_bytes=1000)):
        if each is later:
            await later.load()
            runs += [await ended(later) for _ in range(5)]
        newest = [run.operation.operation_id for run in reversed(runs)]
        known = [run.operation.operation_id for run in each.newest_first("", 0)]
        assert known == newest[: len(known)]
        sizes = [len(body) for (kind, _), body in journal.records.items() if kind == "operation"]
        assert 1000 <= sum(sizes) < 1000 + 2 * max(sizes)
        assert len(sizes) == len(known)


async def test_a_call_that_joined_an_operation_is_refused_once_that_is_forgotten() -> None:
    """Its id may be newer than any that started an operation which is forgotten."""
    journal = Memory()
    kept = operations(journal, retained=1)
    run = await ended(kept)
    call = LoadAdapterRequest(name="math", path="x", header=RequestHeader(request_id=CLOCK.new_id()))
    await kept.join(run, call)
    assert kept.known(call.header.request_id, call) is run
    await ended(kept)
    await ended(kept)
    for each in (kept, later := operations(journal, retained=1)):
        if each is later:
            await later.load()
        with pytest.raises(RlctlError) as refused:
            each.known(call.header.request_id, call)
        assert refused.value.reason is Reason.REQUEST_ID_EXPIRED


async def test_a_clock_that_is_set_back_makes_no_ids_that_are_refused() -> None:
    journal = Memory()
    kept = operations(journal, retained=1)
    for _ in range(4):
        await ended(kept)
    later = operations(journal, retained=1)
    await later.load()
    for each in (kept, later):
        CLOCK.made = 0
        runs = [await ended(each, request_id="") for _ in range(4)]
        found = [run.operation.operation_id for run in runs]
        assert len(set(found)) == 4
        assert all(each.new_id() > old for old in found[:2]), "those that are forgotten by now"
        for old in found[:2]:
            asked = FlushCacheRequest(header=RequestHeader(request_id=old))
            with pytest.raises(RlctlError) as refused:
                each.known(old, asked)
            assert refused.value.reason is Reason.REQUEST_ID_EXPIRED


@pytest.mark.parametrize("ahead_s", [7200, -7200])
async def test_an_operation_takes_as_long_as_it_took_though_the_wall_clock_is_set(
    ahead_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CLOCK, "ahead_s", 0)
    journal = Memory()
    kept = operations(journal, retained=100)
    let, other_let = asyncio.Event(), asyncio.Event()
    running, other = await begun(kept, let), await begun(kept, other_let)
    CLOCK.ahead_s = ahead_s
    let.set()
    await running.ended.wait()
    later = await ended(kept)

    def took_s(run: Run) -> float:
        operation = run.operation
        return (operation.done_time.ToNanoseconds() - operation.create_time.ToNanoseconds()) / 1e9

    assert 0 <= took_s(running) < 60
    in_order = [later.operation.operation_id, other.operation.operation_id, running.operation.operation_id]
    assert [run.operation.operation_id for run in kept.newest_first("", 0)] == in_order
    paged = kept.newest_first("", 0, page_token(later))
    assert [run.operation.operation_id for run in paged] == in_order[1:]
    restarted = operations(journal, retained=100)
    await restarted.load()
    assert took_s(restarted.get(other.operation.operation_id)) >= 0
    assert restarted.newest_first("", 0)[0].place < (await ended(restarted)).place
    other_let.set()
    await other.ended.wait()


async def test_an_id_of_a_clock_that_goes_ahead_makes_nobody_elses_look_old() -> None:
    kept = operations(Memory(), retained=1)
    await ended(kept, request_id="ffffffff-ffff-7000-8000-000000000000")
    await ended(kept)
    mine = CLOCK.new_id()  # and it is on its way for a moment
    await ended(kept)
    assert [run.operation.operation_id[:8] for run in kept.newest_first("", 0)] == ["00000000"] * 2
    assert kept.known(mine, FlushCacheRequest(header=RequestHeader(request_id=mine))) is None


async def test_the_oldest_slots_that_were_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "RETIRED", 4)
    journal = Memory()
    fleet = Roster(journal, CLOCK)

    async def joined(name: str) -> Slot:
        return await fleet.register(StageRegistration(slot=name, model="actor", boot_id=f"boot of {name}"))

    def remembered() -> set[str]:
        assert set(fleet.slots) == {name for name, _ in journal.read("slot")}
        return set(fleet.slots)

    staying = await joined("staying")
    for name in ("z", "y", "b", "a"):
        await fleet.retire(await joined(name))
    assert remembered() == {"staying", "z", "y", "b", "a"}
    await fleet.retire(fleet.slots["z"])  # again
    assert remembered() == {"staying", "z", "y", "b", "a"}
    # What may be serving still is waited for by who publishes a version.
    fleet.slots["z"].lease_until = CLOCK.now() + 60.0
    await fleet.retire(await joined("x"))
    assert remembered() == {"staying", "z", "y", "b", "a", "x"}
    fleet.slots["z"].lease_until = CLOCK.now()
    fleet = Roster(journal, CLOCK)
    fleet.load()
    await fleet.retire(await joined("w"))
    assert remembered() == {"staying", "b", "a", "x", "w"}, "in the order in which they left, also after a restart"
    back = await fleet.register(StageRegistration(slot="x", model="actor", boot_id="another"))
    assert (back.record.incarnation, back.record.HasField("retire_time")) == (2, False)
    assert not staying.record.retired


async def test_an_operation_whose_acceptance_was_cancelled_is_not_left_running_on_record(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db")
    kept = Operations(journal, Roster(journal, CLOCK), CLOCK, Audit(journal, CLOCK), 10)
    slot = Slot(SlotRecord(registration=StageRegistration(slot="a", model="actor")))
    request_id = CLOCK.new_id()
    ran = False

    async def work(_: Run) -> None:
        nonlocal ran
        ran = True

    accepting = asyncio.create_task(
        kept.start(
            FlushCacheRequest(header=RequestHeader(request_id=request_id)),
            verb="FlushCache",
            targets=[slot],
            excluded=[],
            work=work,
            exclusive=True,
            changes=[Put("update", request_id, b"")],
            changes_at_end=[Delete("update", request_id)],
        )
    )
    await asyncio.sleep(0)
    run = kept.get(request_id)
    accepting.cancel()
    await asyncio.wait([accepting])
    assert accepting.cancelled()
    async with asyncio.timeout(10):
        await run.ended.wait()
    assert not ran
    assert not kept.holds(slot)
    assert not journal.read("update")
    [(_, body)] = journal.read("operation")
    operation = OperationRecord.FromString(body).operation
    assert (operation.state, operation.error.reason) == (OPERATION_STATE_CANCELLED, "CANCELLED")
    journal.close()
