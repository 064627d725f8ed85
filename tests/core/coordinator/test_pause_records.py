"""Which pause by name is in force for a slot: newer ones over older ones, what a continue leaves, and a full disk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.contract.errors import Reason, RlctlError
from rlctl.coordinator.fleet.kept_pauses import Pauses
from rlctl.ports import Delete, Put
from rlctl.v1.common_pb2 import Target
from rlctl.v1.fleet_pb2 import Pause
from rlctl.v1.journal_pb2 import PauseRecord


@dataclass
class Place:
    name: str
    model: str = "actor"
    stage: str = "main"


A, B, TALKER, CRITIC = Place("a"), Place("b"), Place("t", stage="talker"), Place("c", model="critic")
ALL = [A, B, TALKER, CRITIC]


class Disk:
    """A journal that may be full."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.full = False

    async def write(self, changes: Sequence[Put | Delete]) -> None:
        if self.full:
            raise Reason.JOURNAL_FAILED.error("full")
        for change in changes:
            self.records.pop(change.key, None)
            if isinstance(change, Put):
                self.records[change.key] = change.body

    def read(self, kind: str) -> Iterable[tuple[str, bytes]]:
        return sorted(self.records.items())

    def owned(self) -> bool:
        return True


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def pauses(disk: Disk) -> Pauses:
    return Pauses(disk, lambda: None)


def record(key: str, target: Target, second: int = 1) -> PauseRecord:
    return PauseRecord(pause=Pause(operation_id=key, since=Timestamp(seconds=second)), target=target)


def in_force(pauses: Pauses) -> dict[str, str]:
    found = {place.name: pauses.of(place).get("") for place in ALL}
    return {name: each.pause.operation_id for name, each in found.items() if each is not None}


async def end(pauses: Pauses, target: Target, refused: Collection[str] = ()) -> None:
    await pauses.end(target, ALL, refused)


async def test_the_newer_of_two_counts_and_one_that_means_no_more_is_replaced(pauses: Pauses, disk: Disk) -> None:
    await pauses.begin(record("all", Target()))
    await pauses.begin(record("a", Target(slots=["a"]), 2))
    assert in_force(pauses) == {"a": "a", "b": "all", "t": "all", "c": "all"}
    await pauses.begin(record("actors", Target(model="actor"), 3))
    assert set(disk.records) == {"all", "a", "actors"}
    await pauses.begin(record("again", Target(), 4))
    assert set(disk.records) == {"again"}
    again = Pauses(disk, lambda: None)
    again.load()
    assert in_force(again) == in_force(pauses) == dict.fromkeys("abtc", "again")


@pytest.mark.parametrize(
    ("target", "left"),
    [
        (Target(), ""),
        (Target(model="critic"), "abt"),
        (Target(slots=["a"]), "btc"),
        (Target(stages=["talker"]), "abc"),
        (Target(model="actor", stages=["main"]), "tc"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_continue_ends_it_for_what_it_means(pauses: Pauses, disk: Disk, target: Target, left: str) -> None:
    await pauses.begin(record("all", Target()))
    await end(pauses, target)
    assert "".join(in_force(pauses)) == left
    again = Pauses(disk, lambda: None)
    again.load()
    assert in_force(again) == in_force(pauses)
    joining = Place("new")
    assert (not pauses.of(joining)) == (not left), "a stage that joins later is paused while any of it is in force"


async def test_slots_that_refuse_to_go_on_stay_under_it_and_no_others(pauses: Pauses) -> None:
    await pauses.begin(record("all", Target()))
    await end(pauses, Target(), refused=["b"])
    assert in_force(pauses) == {"b": "all"}
    assert pauses.of(Place("new")) == {}
    await end(pauses, Target(slots=["b"]))
    assert in_force(pauses) == {}


@pytest.mark.parametrize("target", [Target(model="actor"), Target(model="actor", slots=["a", "b"])])
async def test_what_a_continue_leaves_of_a_pause_of_one_model_covers_that_model_only(
    pauses: Pauses, disk: Disk, target: Target
) -> None:
    await pauses.begin(record("actors", target))
    await end(pauses, Target(model="actor"), refused=["b"])
    again = Pauses(disk, lambda: None)
    again.load()
    for each in (pauses, again):
        assert in_force(each) == {"b": "actors"}
        assert each.of(Place("b", model="critic")) == {}
    await pauses.begin(record("newer", Target(model="actor"), 2))
    assert set(disk.records) == {"newer"}, "the newer pause covers no less"


async def test_what_a_continue_leaves_of_a_pause_of_one_pipeline_stage_covers_that_stage_only(pauses: Pauses) -> None:
    await pauses.begin(record("talkers", Target(stages=["talker"])))
    await end(pauses, Target(), refused=["t"])
    assert in_force(pauses) == {"t": "talkers"}
    assert pauses.of(Place("t", stage="thinker")) == {}


async def test_a_continue_of_one_slot_leaves_the_pause_of_another_that_serves_another_model_at_present(
    pauses: Pauses,
) -> None:
    await pauses.begin(record("two", Target(model="actor", slots=["a", "b"])))
    await pauses.end(Target(slots=["a"]), [A, Place("b", model="critic")], ())
    assert in_force(pauses) == {"b": "two"}
    await pauses.end(Target(slots=["b"]), [A, Place("b", model="critic")], ())
    assert in_force(pauses) == {}


async def test_a_stage_of_another_model_in_a_continued_slot_is_one_that_joins_later(pauses: Pauses, disk: Disk) -> None:
    await pauses.begin(record("all", Target()))
    await end(pauses, Target(model="actor"))
    assert in_force(pauses) == {"c": "all"}
    disk.full = True
    with pytest.raises(RlctlError):
        await pauses.refill("a", disk.write)
    assert in_force(pauses) == {"c": "all"}
    disk.full = False
    await pauses.refill("a", disk.write)
    again = Pauses(disk, lambda: None)
    again.load()
    for each in (pauses, again):
        assert in_force(each) == {"a": "all", "c": "all"}


async def test_one_of_slots_is_gone_with_the_last_of_them(pauses: Pauses, disk: Disk) -> None:
    await pauses.begin(record("two", Target(slots=["a", "b"])))
    await end(pauses, Target(slots=["a"]))
    assert in_force(pauses) == {"b": "two"}
    await end(pauses, Target(slots=["b"]))
    assert disk.records == {}


async def test_one_that_is_taken_back_leaves_what_it_had_replaced(pauses: Pauses, disk: Disk) -> None:
    await pauses.begin(record("a", Target(slots=["a"])))
    await pauses.begin(record("all", Target(), 2))
    await pauses.take_back("all")
    assert in_force(pauses) == {"a": "a"}
    assert set(disk.records) == {"a"}


async def test_one_that_is_taken_back_leaves_nothing_that_a_continue_has_ended_meanwhile(
    pauses: Pauses, disk: Disk
) -> None:
    await pauses.begin(record("two", Target(slots=["a", "b"])))
    await pauses.begin(record("all", Target(), 2))
    await end(pauses, Target(slots=["b"]))
    await pauses.take_back("all")
    assert in_force(pauses) == {"a": "two"}
    await pauses.begin(record("again", Target(), 3))
    await end(pauses, Target())
    await pauses.take_back("again")
    assert in_force(pauses) == {}
    assert disk.records == {}


async def test_one_that_is_confirmed_leaves_nothing_when_it_expires(pauses: Pauses, disk: Disk) -> None:
    await pauses.begin(record("a", Target(slots=["a"])))
    await pauses.begin(record("all", Target(), 2))
    pauses.confirm("all")
    await pauses.expire("all")
    assert in_force(pauses) == {}
    assert disk.records == {}


async def test_of_two_that_are_taken_back_neither_is_in_force_and_what_they_replaced_is(
    pauses: Pauses, disk: Disk
) -> None:
    await pauses.begin(record("a", Target(slots=["a"])))
    await pauses.begin(record("actors", Target(model="actor"), 2))
    await pauses.begin(record("all", Target(), 3))
    await pauses.take_back("actors")
    assert in_force(pauses) == dict.fromkeys("abtc", "all")
    await pauses.take_back("all")
    assert in_force(pauses) == {"a": "a"}
    assert set(disk.records) == {"a"}


async def test_a_full_disk_keeps_none_in_force_that_was_taken_back(pauses: Pauses, disk: Disk) -> None:
    await pauses.begin(record("all", Target()))
    disk.full = True
    await pauses.take_back("all")
    assert in_force(pauses) == {}
    with pytest.raises(RlctlError):
        await pauses.record_ended()
    disk.full = False
    await pauses.record_ended()
    assert disk.records == {}


async def test_one_that_the_disk_does_not_take_is_not_in_force(pauses: Pauses, disk: Disk) -> None:
    disk.full = True
    with pytest.raises(RlctlError):
        await pauses.begin(record("all", Target()))
    assert in_force(pauses) == {}
