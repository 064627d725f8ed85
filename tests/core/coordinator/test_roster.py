"""What the coordinator knows of a stage by its registration."""

from __future__ import annotations

from pathlib import Path

from rlctl.coordinator.fleet.roster import Roster
from rlctl.coordinator.journal.sqlite import SqliteJournal
from rlctl.ports import SystemClock
from rlctl.v1.common_pb2 import WorkerCoordinates
from rlctl.v1.fleet_pb2 import Capabilities, StageLayout, StageRegistration


async def test_a_process_that_registers_again_says_what_it_is_and_can_do_now(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db")
    roster = Roster(journal, SystemClock())
    first = StageRegistration(slot="a", model="actor", boot_id="boot", capabilities=Capabilities(verbs=["FlushCache"]))
    slot = await roster.register(first)
    assert (slot.model, slot.stage, slot.verbs, list(slot.workers)) == ("actor", "main", {"FlushCache"}, [])
    workers = [WorkerCoordinates(rank=rank) for rank in range(2)]
    now = StageRegistration(
        slot="a", model="actor", stage="talker", boot_id="boot", layout=StageLayout(workers=workers)
    )
    assert await roster.register(now) is slot
    assert (slot.stage, slot.verbs, list(slot.workers)) == ("talker", frozenset(), workers)
    other = StageRegistration(slot="a", model="ref", boot_id="another")
    assert (await roster.register(other)).model == "ref"
    assert slot.model == "actor"
    journal.close()
