"""Checks of ``rlctl doctor``: each with readings that are sound, doubtful and broken."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from rlctl.cli.doctor import fleet as of_fleet
from rlctl.cli.doctor import host as of_host
from rlctl.cli.doctor.findings import Finding, Verdict, size
from rlctl.cli.doctor.fleet import Answer, Certificate, FleetReadings
from rlctl.cli.doctor.host import Gpus, HostReadings, Plugin, Space
from rlctl.contract.errors import Reason
from rlctl.transport.tls.identity import Identity
from rlctl.v1.common_pb2 import (
    STAGE_STATE_DIRTY,
    STAGE_STATE_FAILED,
    STAGE_STATE_PAUSED,
    STAGE_STATE_READY,
    STAGE_STATE_UNREACHABLE,
    STAGE_STATE_UPDATING,
)
from rlctl.v1.fleet_pb2 import EngineFailure, Fleet, MinHealthy, Model, Stage, StageRegistration
from rlctl.v1.verbs_pb2 import ServerInfo
from rlctl.version import CONTRACT_VERSION, __version__

OK, WARNING, FAILURE = Verdict
GIB, MIB = 1 << 30, 1 << 20

HOST = HostReadings(
    versions={"grpcio": "1.85"},
    plugins=[Plugin("torch", "rlctl_torch", __version__, installed=True)],
    shared_memory=Space(32 * GIB, 31 * GIB),
    limits={"n": 65536, "u": -1, "l": 65536},
    environment={},
    listens=False,
    fleets=[],
    state=("/state", Space(100 * GIB, 50 * GIB)),
    rdma=False,
    gpus=Gpus(0),
)


def with_host(**readings: Any) -> HostReadings:
    return dataclasses.replace(HOST, **readings)


def worst(findings: Iterable[Finding]) -> Finding:
    listed = list(findings)
    assert all(bool(finding.mend) == (finding.verdict is not OK) for finding in listed)
    return max(listed, key=lambda finding: list(Verdict).index(finding.verdict))


@pytest.mark.parametrize("check", of_host.HOST_CHECKS, ids=lambda check: check.__name__)
def test_a_sound_host_has_nothing_to_mend(check: Callable[[HostReadings], Iterator[Finding]]) -> None:
    findings = list(check(HOST))
    assert findings
    assert {finding.verdict for finding in findings} == {OK}


@pytest.mark.parametrize(
    ("check", "readings", "verdict", "seen", "mend"),
    [
        (of_host.check_shared_memory, {"shared_memory": None}, FAILURE, "there is none", "--shm-size"),
        (
            of_host.check_shared_memory,
            {"shared_memory": Space(8 * GIB, 5 * MIB)},
            FAILURE,
            "full: 5 MiB of 8",
            "Remove",
        ),
        (of_host.check_shared_memory, {"shared_memory": Space(64 * MIB, 64 * MIB)}, WARNING, "by default", "emptyDir"),
        (of_host.check_shared_memory, {"shared_memory": Space(8 * GIB, 500 * MIB)}, WARNING, "500 MiB of 8", "remount"),
        (of_host.check_shared_memory, {"shared_memory": Space(GIB, GIB, False)}, FAILURE, "written", "1777"),
        (of_host.check_limits, {"limits": {"n": 256, "u": -1, "l": -1}}, FAILURE, "256 open files", "ulimit -n 65536"),
        (of_host.check_limits, {"limits": {"n": 1024, "u": -1, "l": -1}}, WARNING, "1024 open", "LimitNOFILE"),
        (of_host.check_limits, {"limits": {"n": -1, "u": 1000, "l": -1}}, WARNING, "1000 processes", "ulimit -u"),
        (of_host.check_limits, {"rdma": True}, WARNING, "64 KiB of locked memory", "memlock"),
        (of_host.check_proxies, {"environment": {"HTTP_PROXY": "p:1"}}, WARNING, "127.0.0.1, localhost", "no_proxy="),
        (of_host.check_port, {"listens": True, "fleets": ["[::1]:9"]}, WARNING, "did not start listens", "--listen"),
        (of_host.check_state, {"state": ("/s", Space(GIB, 10 * MIB))}, FAILURE, "no more operations", "Free"),
        (of_host.check_state, {"state": ("/s", Space(GIB, 500 * MIB))}, WARNING, "500 MiB", "Free"),
        (of_host.check_state, {"state": ("/s", Space(GIB, GIB, False))}, FAILURE, "written", "XDG_STATE_HOME"),
        (of_host.check_gpus, {"gpus": Gpus(8, 0, error="no driver")}, FAILURE, "can use 0: no driver", "nvidia-smi"),
        (of_host.check_gpus, {"gpus": Gpus(8, 4)}, FAILURE, "8 on this host, PyTorch can use 4", "CUDA"),
        (of_host.check_gpus, {"gpus": Gpus(2, 2, [(0, 1), (1, 0)])}, WARNING, "2 of 2 pairs have none", "broadcast"),
        (of_host.check_plugins, {"plugins": []}, FAILURE, "none is installed", "pip"),
        (
            of_host.check_plugins,
            {"plugins": [Plugin("x", "m.n", "1", installed=False)]},
            FAILURE,
            "m.n is not",
            "Install",
        ),
        (
            of_host.check_plugins,
            {"plugins": [Plugin("x", "m", "0.0.9", installed=True)]},
            WARNING,
            "version 0.0.9",
            "rlctl",
        ),
    ],
)
def test_what_is_wrong_with_a_host_is_seen_and_can_be_mended(
    check: Callable[[HostReadings], Iterator[Finding]], readings: dict[str, Any], verdict: Verdict, seen: str, mend: str
) -> None:
    finding = worst(check(with_host(**readings)))
    assert (finding.verdict, seen in finding.seen, mend in finding.mend) == (verdict, True, True), finding


def test_what_only_looks_wrong_is_ok() -> None:
    excepted = {"https_proxy": "p:1", "NO_PROXY": "10.0.0.0/8, localhost,127.0.0.1"}
    assert worst(of_host.check_proxies(with_host(environment=excepted))).verdict is OK
    assert worst(of_host.check_proxies(with_host(environment={"all_proxy": "p", "no_proxy": "*"}))).verdict is OK
    assert worst(of_host.check_proxies(with_host(environment={"http_proxy": ""}))).verdict is OK
    up = with_host(listens=True, fleets=["127.0.0.1:5080"])
    assert worst(of_host.check_port(up)).verdict is OK
    assert worst(of_host.check_gpus(with_host(gpus=Gpus(8, 8)))).verdict is OK


def test_the_readings_of_this_host_pass_through_every_check() -> None:
    host = of_host.read_host()
    assert host.shared_memory is None or 0 <= host.shared_memory.free <= host.shared_memory.total
    assert {plugin.name for plugin in host.plugins} >= {"torch", "fake"}
    assert all(finding.seen for check in of_host.HOST_CHECKS for finding in check(host))


def stage(slot: str, state: int = STAGE_STATE_READY, **facts: Any) -> Stage:
    registration = StageRegistration(
        slot=slot,
        model="actor",
        address=f"127.0.0.1:{1000 + ord(slot[-1])}",
        rollout_address=f"10.0.0.9:{2000 + ord(slot[-1])}",
        contract_version=facts.pop("contract", CONTRACT_VERSION),
    )
    routable = state == STAGE_STATE_READY
    return Stage(registration=registration, state=state, routable=routable, enabled=True, **facts)


def answer(version: str = "2.13", rlctl: str = __version__, clock_s: float = 0.0) -> Answer:
    return Answer(ServerInfo(engine="torch", engine_version=version, rlctl_version=rlctl), clock_s)


def fleet_of(*stages: Stage, **readings: Any) -> FleetReadings:
    answers = {each.registration.slot: answer() for each in stages}
    contract, version = readings.pop("coordinator", (CONTRACT_VERSION, __version__))
    models = readings.pop("models", [])
    message = Fleet(stages=stages, models=models, contract_version=contract, rlctl_version=version)
    answers |= readings.pop("answers", {})
    return FleetReadings("10.0.0.1:5080", message, answers=answers, **readings)


@pytest.mark.parametrize("check", of_fleet.FLEET_CHECKS, ids=lambda check: check.__name__)
def test_a_sound_fleet_has_nothing_to_mend(check: Callable[[FleetReadings], Iterator[Finding]]) -> None:
    findings = list(check(fleet_of(stage("a"), stage("b"), admitted=["a", "b"])))
    assert findings
    assert {finding.verdict for finding in findings} == {OK}


LOST = stage("a", STAGE_STATE_UNREACHABLE, not_routable="UNREACHABLE: the link is lost")
CRASHED = stage("a", STAGE_STATE_FAILED, not_routable="FAILED: crash loop, 8 failures in a row: out of memory")
PAUSED = stage("a", STAGE_STATE_PAUSED, not_routable="PAUSED")
WRITTEN = stage("a", STAGE_STATE_UPDATING, not_routable="UPDATING")
HALF = Model(name="actor", min_healthy=MinHealthy(percent=50), min_healthy_stages=1)
UNHEALABLE = stage("a", STAGE_STATE_DIRTY, not_routable="DIRTY: it broke, UNHEALABLE: no source", unhealable=True)
ENDED = stage(
    "a", STAGE_STATE_UNREACHABLE, not_routable="UNREACHABLE: killed", engine_failure=EngineFailure(reason="killed")
)
ALICE = Certificate(Identity.of("rlctl://lab/client/alice"), 80 * 86400.0)
ENDS_SOON = Certificate(Identity.of("rlctl://lab/stage/a"), 3 * 86400.0)
ENDED_ONE = Certificate(Identity.of("rlctl://lab/stage/a"), -60.0, "expired at noon")
SILENT = {"a": Answer(error="TIMED_OUT")}


@pytest.mark.parametrize(
    ("check", "fleet", "verdict", "seen", "mend"),
    [
        (of_fleet.check_clocks, fleet_of(clock_s=-5.0), WARNING, "5.0s behind", "NTP"),
        (
            of_fleet.check_clocks,
            fleet_of(stage("a"), answers={"a": answer(clock_s=300)}),
            FAILURE,
            "5m00s ahead",
            "NTP",
        ),
        (
            of_fleet.check_certificate,
            fleet_of(certificates=[ALICE, ENDS_SOON]),
            WARNING,
            "in 3 days",
            "DIR stage/a`",
        ),
        (of_fleet.check_certificate, fleet_of(certificates=[ALICE, ENDED_ONE]), FAILURE, "it expired", "DIR stage/a`"),
        (of_fleet.check_links, fleet_of(LOST, certificates=[ENDED_ONE]), FAILURE, "link is lost", "DIR stage/a`"),
        (of_fleet.check_versions, fleet_of(coordinator=(1, "0.0.1")), WARNING, "rlctl 0.0.1", "one release"),
        (of_fleet.check_versions, fleet_of(stage("a", contract=CONTRACT_VERSION + 2)), FAILURE, "contract", "N-1"),
        (of_fleet.check_versions, fleet_of(stage("a", contract=CONTRACT_VERSION + 1)), WARNING, "contract", "N-1"),
        (
            of_fleet.check_engines,
            fleet_of(stage("a"), stage("b"), answers={"b": answer("2.12")}),
            WARNING,
            "2.12 at b, 2.13 at a",
            "one environment",
        ),
        (
            of_fleet.check_links,
            fleet_of(LOST),
            FAILURE,
            "link is lost",
            "take-over",
        ),
        (of_fleet.check_links, fleet_of(LOST), FAILURE, "link is lost", "not stopped; `rlctl restart a`"),
        (of_fleet.check_links, fleet_of(ENDED), FAILURE, "UNREACHABLE: killed", "`rlctl logs a` has the cause"),
        (of_fleet.check_links, fleet_of(WRITTEN), WARNING, "UPDATING", "rlctl operations"),
        (of_fleet.check_links, fleet_of(UNHEALABLE), WARNING, "UNHEALABLE: no source", "heal a --checkpoint DIR"),
        (of_fleet.check_links, fleet_of(CRASHED), FAILURE, "crash loop", "restart a"),
        (of_fleet.check_min_healthy, fleet_of(LOST, models=[HALF]), WARNING, "50%, below: 0 routable", "min-healthy"),
        (
            of_fleet.check_links,
            fleet_of(stage("a"), answers={"a": Answer(error="TIMED_OUT")}),
            FAILURE,
            "TIMED",
            "logs a",
        ),
        (
            of_fleet.check_links,
            fleet_of(PAUSED),
            WARNING,
            "PAUSED",
            "describe stage a",
        ),
        (of_fleet.check_links, fleet_of(stage("a"), admitted=["a", "b"]), WARNING, "not registered", "10.0.0.1:5080"),
        (of_fleet.check_links, fleet_of(), WARNING, "no stage is registered", "rlctl up"),
        (
            of_fleet.check_addresses,
            fleet_of(stage("a"), reached={f"127.0.0.1:{1000 + ord('a')}": "Connection refused"}),
            WARNING,
            "only its own host",
            "--advertise",
        ),
        (
            of_fleet.check_addresses,
            fleet_of(stage("a"), reached={f"10.0.0.9:{2000 + ord('a')}": "no answer within 2 s"}),
            WARNING,
            "no answer within 2 s",
            "firewall",
        ),
    ],
)
def test_what_is_wrong_with_a_fleet_is_seen_and_can_be_mended(
    check: Callable[[FleetReadings], Iterator[Finding]], fleet: FleetReadings, verdict: Verdict, seen: str, mend: str
) -> None:
    finding = worst(check(fleet))
    assert (finding.verdict, seen in finding.seen, mend in finding.mend) == (verdict, True, True), finding


def test_a_model_at_its_limit_is_ok() -> None:
    (finding,) = of_fleet.check_min_healthy(fleet_of(LOST, stage("b"), models=[HALF, Model(name="critic")]))
    assert (finding.verdict, finding.seen) == (OK, "1 of 2 have a limit, none is below")


def test_the_addresses_of_a_failed_stage_are_not_looked_for() -> None:
    lost = fleet_of(CRASHED, stage("b"), reached=dict.fromkeys(("127.0.0.1:1097", "10.0.0.9:2097"), "refused"))
    (finding,) = of_fleet.check_addresses(lost)
    assert (finding.verdict, finding.seen) == (OK, "2 of 2 advertised addresses are reached from here")


def test_a_certificate_that_is_valid_for_long_is_ok() -> None:
    (finding,) = of_fleet.check_certificate(fleet_of(certificates=[ALICE, ALICE]))
    assert (finding.verdict, finding.seen) == (OK, "2 of 2 valid for 80 days at least")


def test_the_time_of_a_look_is_no_difference_of_clocks() -> None:
    def at(seconds: float) -> Timestamp:
        stamp = Timestamp()
        stamp.FromNanoseconds(int(seconds * 1e9))
        return stamp

    assert of_fleet.ahead_s(at(103.0), 100.0, 105.0) == 0.0
    assert of_fleet.ahead_s(at(107.0), 100.0, 105.0) == pytest.approx(2.0)
    assert of_fleet.ahead_s(at(97.0), 100.0, 105.0) == pytest.approx(-3.0)
    assert of_fleet.ahead_s(Timestamp(), 100.0, 105.0) == 0.0


def test_a_coordinator_that_does_not_answer_is_a_failure_with_the_next_step_of_its_error() -> None:
    finding = of_fleet.unreachable("h:1", Reason.UNREACHABLE.error("no coordinator answers", next_step="Start it."))
    assert (finding.verdict, finding.seen, finding.mend) == (FAILURE, "no coordinator answers", "Start it.")
    silent = of_fleet.unreachable("h:1", Reason.DEADLINE_EXCEEDED.error("longer than 5 s", next_step="Wait longer."))
    assert "hangs or is stopped" in silent.mend


def test_a_fleet_without_a_reachable_stage_is_checked_all_the_same() -> None:
    """Every engine has crashed: the checks of the links are what is needed then."""

    class NoTargets:
        """A coordinator that reaches no stage."""

        def status(self) -> Fleet:
            return Fleet(stages=[CRASHED])

        def call(self, *_: object, **__: object) -> None:
            raise Reason.NO_TARGETS.error("no target is available")

        def admit(self, *_: object, **__: object) -> None:
            raise Reason.SCOPE_MISSING.error("not an operator")

    readings = of_fleet.read_fleet(NoTargets(), "h:1")  # type: ignore[arg-type]
    finding = worst(of_fleet.check_links(readings))
    assert (finding.verdict, finding.subject) == (FAILURE, "stage a")


def test_sizes_are_read_at_a_glance() -> None:
    assert [size(number) for number in (0, 64 * MIB, 1.5 * GIB, 2000 * GIB)] == [
        "0 bytes",
        "64 MiB",
        "1.5 GiB",
        "2000 GiB",
    ]


def test_a_probe_of_the_gpus_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(of_host, "gpu_count", lambda: 1)
    monkeypatch.setattr(of_host.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(of_host, "_GPU_PROBE", "import time; time.sleep(10)")
    monkeypatch.setattr(of_host, "GPU_PROBE_S", 0.2)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: killed.append(self))
    started = time.monotonic()
    gpus = of_host._gpus()
    assert time.monotonic() - started < 5
    assert gpus == Gpus(1, error="the driver does not answer within 0.2 s")
    (probe,) = killed
    probe.send_signal(signal.SIGKILL)
    probe.communicate()
