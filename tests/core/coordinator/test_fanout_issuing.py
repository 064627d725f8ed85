"""How a fan-out issues its commands: some at a time, and what may happen between."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from google.protobuf.any_pb2 import Any as Packed

from rlctl.command_stream.commander import Commander
from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.fleet.slot import Slot
from rlctl.coordinator.fleet.stage_links import Peers
from rlctl.coordinator.operations.fanout import AT_ONCE, Fanout
from rlctl.ports import SystemClock
from rlctl.v1.common_pb2 import OUTCOME_REJECTED, OUTCOME_UNKNOWN, ResponseHeader
from rlctl.v1.control_pb2 import ControlRequest
from rlctl.v1.fleet_pb2 import StageReport
from rlctl.v1.journal_pb2 import SlotRecord
from rlctl.v1.results_pb2 import StageResult
from rlctl.v1.verbs_pb2 import FlushCacheRequest

ANSWER_S = 0.2
"""Nobody answers in these tests: what was sent is UNKNOWN after so long."""


class Wire:
    """What goes to every stage, in order; nothing comes back."""

    def __init__(self, count: int) -> None:
        self.sent: list[tuple[str, ControlRequest]] = []
        self.clock = SystemClock()
        self.ended: list[str] = []
        observer = SimpleNamespace(fan_out_ended=lambda verb, took_s: self.ended.append(verb))
        self.roster = SimpleNamespace(epoch=3, header=ResponseHeader, quarantine=self._quarantine, observer=observer)
        peers = SimpleNamespace(succession=lambda: None, issue=self._issue, cancel=self._cancel, grant=lambda _: None)
        self.fanout = Fanout(cast(Roster, self.roster), cast(Peers, peers), self.clock)
        self.slots = [self._slot(f"stage-{number:02}") for number in range(count)]

    async def run(self, operation_id: str) -> list[StageResult]:
        deadline = self.clock.now() + ANSWER_S
        return await self.fanout.run(
            FlushCacheRequest(), self.slots, operation_id=operation_id, step="1", deadline=deadline
        )

    def commands(self, slot: str) -> list[str]:
        """Operations whose commands went to a stage."""
        return [m.command.operation_id for name, m in self.sent if name == slot and m.HasField("command")]

    def epochs(self) -> list[int]:
        found = []
        for _, message in self.sent:
            request = FlushCacheRequest()
            if message.command.request.Unpack(request):
                found.append(request.header.fence.fleet_epoch)
        return found

    def _slot(self, name: str) -> Slot:
        record = SlotRecord(incarnation=1)
        record.registration.slot = name
        record.registration.capabilities.verbs.append("FlushCache")
        link = SimpleNamespace(send=lambda message: self.sent.append((name, message)))
        slot = Slot(record)
        slot.commander, slot.report = Commander(cast(Any, link), self.clock), StageReport()
        return slot

    def _issue(self, slot: Slot, command_id: str, operation_id: str, request: Packed, deadline: float, *, again: bool):  # type: ignore[no-untyped-def]
        assert slot.commander is not None
        return slot.commander.issue(command_id, operation_id, request, deadline, again=again)

    def _cancel(self, slot: Slot, command_id: str) -> None:
        assert slot.commander is not None
        slot.commander.cancel(command_id)

    async def _quarantine(self, spoilt: object) -> None:
        pass


async def test_what_was_not_sent_when_somebody_cancels_is_not_sent_any_more() -> None:
    wire = Wire(3 * AT_ONCE)
    running = asyncio.create_task(wire.run("flush"))
    await asyncio.sleep(0)
    wire.fanout.cancel(wire.slots, "flush", "1")
    results = await running
    assert [result.outcome for result in results] == [OUTCOME_UNKNOWN] * AT_ONCE + [OUTCOME_REJECTED] * 2 * AT_ONCE
    assert {result.error.reason for result in results[AT_ONCE:]} == {"CANCELLED"}
    assert {slot.name for slot in wire.slots if wire.commands(slot.name)} == {s.name for s in wire.slots[:AT_ONCE]}


async def test_what_waits_for_another_fan_out_can_be_cancelled_and_is_not_sent() -> None:
    wire = Wire(2 * AT_ONCE)
    first = asyncio.create_task(wire.run("first"))
    second = asyncio.create_task(wire.run("second"))
    await asyncio.sleep(0)
    wire.fanout.cancel(wire.slots, "second", "1")
    assert {result.outcome for result in await second} == {OUTCOME_REJECTED}
    assert {result.outcome for result in await first} == {OUTCOME_UNKNOWN}
    assert all(wire.commands(slot.name) == ["first"] for slot in wire.slots)


async def test_every_stage_hears_of_two_fan_outs_in_the_same_order() -> None:
    wire = Wire(3 * AT_ONCE)
    await asyncio.gather(wire.run("first"), wire.run("second"), wire.run("third"))
    assert wire.ended == ["FlushCache"] * 3
    assert all(wire.commands(slot.name) == ["first", "second", "third"] for slot in wire.slots)


async def test_an_epoch_that_is_raised_meanwhile_fences_what_is_sent_after_it() -> None:
    wire = Wire(2 * AT_ONCE)
    running = asyncio.create_task(wire.run("flush"))
    await asyncio.sleep(0)
    wire.roster.epoch = 4
    await running
    assert wire.epochs() == [3] * AT_ONCE + [4] * AT_ONCE
