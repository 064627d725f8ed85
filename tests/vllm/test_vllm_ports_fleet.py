"""The data port of a real vLLM server under updates: nothing stale, nothing lost, nothing left running.

The module comes after test_vllm_fleet.py, which expects the server at its first version.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import port_load
import pytest

from rlctl.launch.fleet_controller import LaunchedFleet
from rlctl.sdk.blocking import Fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

UPDATES = 12
KEPT = 8
"""Updates without a flush."""


@pytest.fixture(scope="module")
def fleet(solo: LaunchedFleet) -> Iterator[Fleet]:
    with solo.connect() as fleet:
        yield fleet


async def test_answers_under_updates_are_of_the_versions_that_they_name(fleet: Fleet, tiny: tuple[Any, Path]) -> None:
    fleet.update_weights_from_disk(str(tiny[1]), version="start")
    await port_load.run(fleet, port_load.VLLM, tiny[0], UPDATES, ("abort", "retract", "in_place", "drain"))


async def test_frozen_requests_go_on_with_their_kv_entries_where_an_update_keeps_these(
    fleet: Fleet, tiny: tuple[Any, Path]
) -> None:
    fleet.update_weights_from_disk(str(tiny[1]), version="start without a flush")
    await port_load.run(fleet, port_load.VLLM, tiny[0], KEPT, ("in_place",), flush=False)
