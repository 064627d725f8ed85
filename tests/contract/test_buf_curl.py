"""The fleet as a debugger sees it: reflection and plain calls, with no proto file at hand (what grpcurl does)."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.launch.fleet_controller import EngineSpec, LaunchedFleet

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "docs" / "guides" / "quickstart.md"
COORDINATOR = "rlctl.v1.CoordinatorService"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


@pytest.fixture
def address(tmp_path: Path, checkpoint: Callable[[str], str]) -> Iterator[str]:
    engines = [EngineSpec(slot, checkpoint("one"), engine="fake") for slot in ("a", "b")]
    with LaunchedFleet(engines, directory=tmp_path / "fleet") as fleet:
        yield fleet.address


@pytest.fixture(scope="module")
def buf() -> Path:
    """The buf that tools/protos installs."""
    subprocess.run([ROOT / "tools" / "protos", "--check"], capture_output=True, check=True)
    return ROOT / ".venv-protos" / "bin" / "buf"


def curl(buf: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def call(buf: Path, address: str, method: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    done = curl(buf, "-d", json.dumps(body or {}), f"http://{address}/{COORDINATOR}/{method}")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_services_and_methods_are_listed(buf: Path, address: str) -> None:
    listed = curl(buf, "--list-services", f"http://{address}")
    assert listed.returncode == 0, listed.stderr
    assert {COORDINATOR, "grpc.health.v1.Health"} <= set(listed.stdout.split())
    methods = curl(buf, "--list-methods", f"http://{address}")
    assert f"{COORDINATOR}/PauseGeneration" in methods.stdout


def test_the_call_of_the_quickstart_works(buf: Path, address: str) -> None:
    (line,) = [line for line in QUICKSTART.read_text().splitlines() if line.startswith(".venv-protos/bin/buf")]
    command = shlex.split(line.replace("127.0.0.1:5080", address))
    done = subprocess.run([buf, *command[1:]], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "OPERATION_STATE_OK"


def test_a_fleet_is_paused_checked_and_continued(buf: Path, address: str) -> None:
    paused = call(buf, address, "PauseGeneration", {"mode": "PAUSE_MODE_RETRACT"})
    assert paused["state"] == "OPERATION_STATE_OK"
    assert [stage["state"] for stage in paused["stageResults"]] == ["STAGE_STATE_PAUSED"] * 2
    checked = call(buf, address, "CheckWeights")
    digests = {rank["check"]["modelDigest"] for stage in checked["stageResults"] for rank in stage["rankResults"]}
    assert len(digests) == 1
    continued = call(buf, address, "ContinueGeneration")
    assert [stage["state"] for stage in continued["stageResults"]] == ["STAGE_STATE_READY"] * 2
    fleet = call(buf, address, "GetFleet")
    assert all(stage["routable"] for stage in fleet["stages"])


def test_a_refusal_names_the_field_and_the_reason(buf: Path, address: str) -> None:
    body = json.dumps({"header": {"target": {"slots": ["nobody"]}}})
    refused = curl(buf, "-d", body, f"http://{address}/{COORDINATOR}/PauseGeneration")
    assert refused.returncode != 0
    error = json.loads(refused.stderr)
    assert error["code"] == "not_found"
    assert "header.target.slots[0]" in error["message"]
    assert error["details"][0]["type"] == "google.rpc.ErrorInfo"
