"""Random requests to every RPC and route (:mod:`tests.fuzz`): a short run, and what the tool itself must notice."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlctl.coordinator.service import Coordinator
from rlctl.gateway import dialects
from rlctl.gateway.backend.service import Settings
from rlctl.v1.coordinator_pb2 import ListVersionsResponse
from tests.fuzz import worlds
from tests.fuzz.runner import run
from tests.fuzz.worlds import OwnersWorld

ROOT = Path(__file__).parents[2]


def fuzz(inputs: int, seed: int) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", str(inputs), "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_input_shows_a_fault() -> None:
    fuzz(2000, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_input_of_a_fresh_seed_shows_a_fault() -> None:
    fuzz(60_000, random.randrange(10**9))


def test_a_defect_is_reported_with_the_input_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def defective(self: Coordinator, request: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(Coordinator, "list_versions", defective)
    report = run(1, range(5), "owner/CoordinatorService.ListVersions")
    assert any("INTERNAL" in fault.text and fault.target for fault in report.faults)
    assert any("ValueError: planted" in fault.text for fault in report.faults), "the log of the server"
    shown = next(fault for fault in report.faults if fault.target)
    again = run(1, range(shown.index, shown.index + 1), shown.target)
    assert [fault.index for fault in again.faults if fault.target] == [shown.index]


def test_a_change_without_rights_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def careless(self: Coordinator, request: Any) -> Any:
        for slot in self.roster.slots.values():
            slot.record.enabled = False
        return ListVersionsResponse()

    monkeypatch.setattr(Coordinator, "list_versions", careless)
    report = run(1, range(5), "viewer/CoordinatorService.ListVersions")
    assert any("callers without rights have changed the fleet" in fault.text for fault in report.faults)


async def test_every_rpc_and_route_is_a_target(tmp_path: Path) -> None:
    world = OwnersWorld(tmp_path / "world")
    await world.start()
    names = {target.name for target in world.targets}
    await world.stop()
    rpcs = {f"owner/{name}.{method.name}" for name, service in worlds.contract().items() for method in service.methods}
    assert rpcs <= names

    class Generation:
        settings = Settings()

    for dialect in dialects.names():
        routes = dialects.load(dialect, Generation()).routes  # type: ignore[arg-type]
        paths = {f"owner/{dialect} {method} {row.path}" for row in routes for method in row.methods.split()}
        assert paths <= names
