"""``rlctl doctor`` on this host, and with fleets: sound, without a stage, without their token, gone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Cli, LiveFleet, started

from rlctl.testing.in_process_fleet import StageSpec
from rlctl.transport.tls.authority import Authority
from rlctl.v1.coordinator_pb2 import RegisterStageRequest
from rlctl.v1.fleet_pb2 import StageRegistration

Make = Callable[..., AbstractContextManager[LiveFleet]]


def of(findings: list[dict[str, Any]], *checks: str) -> list[tuple[str, str]]:
    return [(each["subject"], each["verdict"]) for each in findings if each["check"] in checks]


def test_without_a_fleet_only_the_host_is_checked(cli: Cli) -> None:
    findings = cli("doctor", "-o", "json").data
    assert {"versions", "plug-ins", "shared-memory", "limits", "proxies", "port", "state", "gpus"} == {
        each["check"] for each in findings
    }
    assert all(bool(each["mend"]) == (each["verdict"] != "ok") for each in findings)


def test_a_sound_fleet(rlctl: LiveFleet) -> None:
    findings = rlctl("doctor", "-o", "json").data
    checks = ("coordinator", "certificate", "clocks", "versions", "engines", "links", "addresses")
    assert of(findings, *checks)[1:] == [
        (rlctl.endpoint, "ok"),
        ("transport", "ok"),
        ("clocks", "ok"),
        ("fleet", "ok"),
        ("engine fake", "ok"),
        ("stages", "ok"),
        ("addresses", "ok"),
    ]
    (clocks,) = [each["seen"] for each in findings if each["check"] == "clocks"]
    assert clocks.startswith("3 of 3 within 1 s")
    table = rlctl("doctor")
    assert "\x1b[" not in table.out
    assert "0 failures" in table.err


def test_a_stage_that_nobody_reaches_fails_in_both_directions_with_its_mend(rlctl: LiveFleet) -> None:
    async def register() -> None:
        ghost = StageRegistration()
        ghost.CopyFrom(rlctl.fleet.stage("a").registration)
        ghost.slot, ghost.boot_id, ghost.address, ghost.rollout_address = "ghost", "1", "127.0.0.1:1", "127.0.0.1:1"
        await rlctl.fleet.stub.RegisterStage(RegisterStageRequest(registration=ghost))

    rlctl.loop.call(register())
    ran = rlctl("doctor", "-o", "json")
    assert ran.code == 1
    assert of(ran.data, "links") == [("stage ghost", "failure"), ("stages", "ok")]
    assert of(ran.data, "addresses") == [("ghost admin", "warning"), ("ghost rollout", "warning"), ("addresses", "ok")]
    (mend,) = [each["mend"] for each in ran.data if each["subject"] == "stage ghost"]
    assert "reach 127.0.0.1:1" in mend
    (refused,) = [each["seen"] for each in ran.data if each["subject"] == "ghost admin"]
    assert refused == "127.0.0.1:1: Connection refused"


def test_a_paused_stage_is_a_warning_and_no_failure(rlctl: LiveFleet) -> None:
    assert rlctl("pause", "--slot", "a").code == 0
    ran = rlctl("doctor", "-o", "json")
    assert of(ran.data, "links") == [("stage a", "warning"), ("stages", "ok")]
    assert "stage a" in rlctl("doctor", "-o", "name").out.splitlines()


def test_a_fleet_that_wants_another_token_is_a_failure(make_fleet: Make) -> None:
    with make_fleet(token="right", a=1) as rlctl:
        ran = rlctl("doctor", "-o", "json")
    assert ran.code == 1
    (finding,) = [each for each in ran.data if each["check"] == "coordinator"]
    assert "token" in finding["seen"]
    assert finding["mend"]


def test_a_fleet_with_certificates_is_looked_at_and_backed_up_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")
    for name, path in authority.issue("client/test", days=5).variables.items():
        monkeypatch.setenv(name, path)
    (tmp_path / "weights.txt").write_text("one")
    with started(tmp_path / "journal.db", [StageSpec("a", str(tmp_path))], authority=authority) as rlctl:
        ran = rlctl("doctor", "-o", "json")
        backup = rlctl("journal", "backup", str(tmp_path / "backup.db"))
    assert (ran.code, backup.code) == (0, 0), backup.err
    assert of(ran.data, "certificate", "links", "addresses") == [
        ("rlctl://lab/client/test", "warning"),
        ("certificates", "ok"),
        ("stages", "ok"),
        ("addresses", "ok"),
    ]


def test_a_coordinator_that_is_gone_is_a_failure(cli: Cli) -> None:
    ran = cli("--endpoint", "127.0.0.1:1", "doctor")
    assert ran.code == 1
    assert "failure  127.0.0.1:1" in ran.out
    assert "→ `rlctl up` starts a fleet" in ran.out
