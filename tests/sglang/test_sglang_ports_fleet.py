"""The data ports of two real SGLang servers under updates: nothing stale, nothing lost, nothing left running.

The module comes after test_sglang_fleet.py, which expects the servers at their first version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import port_load
import pytest

from rlctl.sdk.blocking import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

UPDATES = 18
KEPT = 8
"""Updates without a flush."""


async def test_answers_under_updates_are_of_the_versions_that_they_name(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    fleet.update_weights_from_disk(str(tiny[1]), version="start")
    await port_load.run(fleet, port_load.SGLANG, tiny[0], UPDATES, ("abort", "retract", "in_place"))


async def test_frozen_requests_go_on_with_their_kv_entries_where_an_update_keeps_these(
    fleet: Fleet, tiny: tuple[Any, Path]
) -> None:
    fleet.update_weights_from_disk(str(tiny[1]), version="start without a flush")
    await port_load.run(fleet, port_load.SGLANG, tiny[0], KEPT, ("in_place",), flush=False)
