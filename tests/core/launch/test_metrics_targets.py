"""The metrics addresses of a fleet: in the command lines, and in the file for Prometheus."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlctl.launch.interface.spec import EngineSpec, GatewaySpec, any_port, rank_arguments
from rlctl.launch.metrics_targets import FILE, MetricsTargets
from rlctl.runtime import private_files


@dataclass
class Process:
    name: str
    facts: dict[str, str] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("10.0.0.1:5080", "10.0.0.1:0"), ("[::1]:5080", "[::1]:0"), ("unix:/run/rlctl", "127.0.0.1:0")],
)
def test_metrics_are_served_on_the_host_that_a_server_binds(listen: str, expected: str) -> None:
    assert any_port(listen) == expected


def test_stages_and_gateways_are_told_to_serve_metrics() -> None:
    def option(arguments: list[str]) -> str:
        return arguments[arguments.index("--metrics") + 1]

    spec = EngineSpec("actor-0", "/model", tp_size=2, bind="10.0.0.1", metrics=True)
    assert option(rank_arguments(spec, 0, "coordinator:1", ["follower:2"])) == "10.0.0.1:0"
    assert "--metrics" not in rank_arguments(spec, 1, "coordinator:1")
    assert option(GatewaySpec("actor", "127.0.0.1:8000", metrics=True).arguments("coordinator:1")) == "127.0.0.1:0"
    assert "--metrics" not in GatewaySpec("actor", "127.0.0.1:8000").arguments("coordinator:1")


def test_the_file_lists_the_processes_that_serve_metrics(tmp_path: Path) -> None:
    def read() -> list[dict[str, Any]]:
        return json.loads((tmp_path / FILE).read_text())

    warnings: list[str] = []
    targets = MetricsTargets(tmp_path, warnings.append)
    coordinator = Process("coordinator", {"metrics_address": "127.0.0.1:1"})
    gateway = Process("gateway-actor", {"metrics_address": "127.0.0.1:3"})
    stage, follower = Process("actor-0"), Process("actor-0.1", {"address": "127.0.0.1:9"})
    processes: list[Any] = [coordinator, stage, follower, gateway]
    targets.write(processes)
    assert [target["labels"]["process"] for target in read()] == ["coordinator", "gateway-actor"]
    stage.facts["metrics_address"] = "127.0.0.1:2"
    targets.write(processes)
    assert [(target["targets"], target["labels"]["job"]) for target in read()] == [
        (["127.0.0.1:1"], "rlctl-coordinator"),
        (["127.0.0.1:2"], "rlctl-stage"),
        (["127.0.0.1:3"], "rlctl-gateway"),
    ]
    written = (tmp_path / FILE).stat().st_mtime_ns
    targets.write(processes)
    assert (tmp_path / FILE).stat().st_mtime_ns == written
    assert {path.name for path in tmp_path.iterdir()} == {FILE}
    assert warnings == []


def test_a_full_disk_is_one_warning_and_the_file_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    warnings: list[str] = []
    targets = MetricsTargets(tmp_path, warnings.append)
    processes: list[Any] = [Process("coordinator", {"metrics_address": "127.0.0.1:1"})]
    with monkeypatch.context() as patch:
        patch.setattr(private_files, "write_text", full)
        targets.write(processes)
        targets.write(processes)
    (warning,) = warnings
    assert FILE in warning
    assert "No space left on device" in warning
    targets.write(processes)
    assert len(json.loads((tmp_path / FILE).read_text())) == 1
