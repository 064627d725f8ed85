"""The failures of the week that come with time, as the operator sees them: certificates that end, clocks that jump.

The fleet has certificates, and nobody renews them: the key of its CA is elsewhere. Its processes and its trainer have
wall clocks of their own, which tests set.
"""

from __future__ import annotations

import datetime
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from guide_rows import Ran, Row, until
from shifted_clocks import COMPILER, ShiftedClocks
from up_helpers import known, own_state, rlctl_command

import rlctl
from rlctl.contract.errors import Reason, RlctlError
from rlctl.demo import tiny as demo_tiny
from rlctl.sdk.blocking import Fleet
from rlctl.transport.tls.authority import Authority
from rlctl.transport.tls.credentials import Tls
from rlctl.transport.tls.diagnosis import presented

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(COMPILER is None, reason="the clocks of processes are shifted by a library, built with cc"),
]

NAME, SLOT = "time", "actor-0"
SOON_S = 8
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
GRANTED_S = 4.0
"""Grants of serving leases come every 3 s."""


class Trainer:
    """A trainer in a process, which publishes when it is told."""

    def __init__(self, endpoint: str, environment: dict[str, str], log: Path) -> None:
        script = Path(__file__).with_name("trainer_on_demand.py")
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, script, endpoint],
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._log = log
        assert self._line() == "connected\n"

    def publish(self, label: str) -> dict[str, Any]:
        """Publish the next version. Returns the trainer's account of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{label}\n")
        self.process.stdin.flush()
        return json.loads(self._line())  # type: ignore[no-any-return]

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._log.read_text()
        return line


@dataclass
class Week:
    """The fleet, its certificates and clocks, and its trainer.

    Attributes:
        keeper: the directory with the key of the CA, from where new certificates are copied to the fleet's.
    """

    directory: Path
    keeper: Authority
    clocks: ShiftedClocks
    trainer: Trainer

    @property
    def endpoint(self) -> str:
        return known(NAME).endpoint

    def pid(self, process: str) -> int:
        return known(NAME).processes[process]

    def issue(self, path: str, ends_at: datetime.datetime | None = None) -> Tls:
        """Put a new certificate in the place of the old one; it ends in 90 days, or at a time within a day."""
        begins = None if ends_at is None else ends_at - datetime.timedelta(days=1)
        days = 90 if ends_at is None else 1
        made, place = self.keeper.issue(path, days=days, begins=begins), Authority(self.directory).files(path)
        place.cert.parent.mkdir(exist_ok=True)
        for new, old in ((made.key, place.key), (made.cert, place.cert)):
            os.replace(shutil.copy(new, f"{old}.new"), old)
        return Tls(place)

    def stage(self) -> dict[str, Any]:
        (stage,) = Ran("get", "stages", "-o", "json").data
        return stage  # type: ignore[no-any-return]

    def doctor(self) -> dict[str, dict[str, Any]]:
        """Return the findings of `rlctl doctor` that need a mend, by subject."""
        findings = json.loads(rlctl_command("doctor", "-o", "json").stdout)
        return {each["subject"]: each for each in findings if each["mend"]}

    def sound(self) -> None:
        until(lambda: self.stage()["routable"], "the stage does not serve")
        assert Ran("generate", "1+2=").code == 0


def sequence(fleet: Fleet) -> int:
    """Generate, and return the sequence of the version that has answered."""
    answer = fleet.generate("1+2=", model="actor", max_new_tokens=2, timeout_s=30)
    (found,) = {span.version.sequence for sample in answer.samples for span in sample.versions}
    return found


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Any, Path]) -> Iterator[Week]:
    directory = tmp_path_factory.mktemp("week")
    clocks, tls, file = ShiftedClocks(directory), directory / "tls", directory / "fleet.yaml"
    fleet = {"name": NAME, "hf_checkpoint": str(tiny[1]), "listen": "127.0.0.1:0", "auth": {"tls": str(tls)}}
    groups = [{"worker_type": "regular", "num_gpus": 1}]
    file.write_text(json.dumps({"fleet": fleet, "models": [{"name": "actor", "server_groups": groups}]}))
    Authority.init(tls, "lab")
    with pytest.MonkeyPatch.context() as patch, own_state(patch, directory):
        patch.setenv("RLCTL_LOG_FORMAT", "json")
        patch.setenv("COLUMNS", "400")
        with pytest.MonkeyPatch.context() as shifted:
            for name, value in clocks.variables.items():
                shifted.setenv(name, value)
            up = rlctl_command("up", str(file), "--detach", timeout_s=200)
        assert up.returncode == 0, up.stderr
        keeper = Authority(shutil.copytree(tls, directory / "keeper"))
        (tls / "ca.key").unlink()
        for path in (f"client/{getpass.getuser()}", "trainer/clocks"):
            keeper.issue(path)
            shutil.copytree(keeper.directory / path.split("/")[0], tls / path.split("/")[0], dirs_exist_ok=True)
        environment = clocks.variables | Authority(tls).files("trainer/clocks").variables
        trainer = Trainer(known(NAME).endpoint, environment, directory / "trainer.err")
        try:
            yield Week(tls, keeper, clocks, trainer)
        finally:
            trainer.process.kill()
            trainer.process.communicate()
        assert rlctl_command("down", "--name", NAME, "--yes").returncode == 0
    for log in directory.rglob("logs/*.log"):
        assert "Traceback" not in log.read_text(), log


@pytest.fixture(autouse=True)
def _of_a_sound_fleet(week: Week) -> None:
    week.sound()


def test_certificates_end_and_are_renewed_without_a_restart(week: Week) -> None:
    row = Row("a certificate has expired")
    row.step("rlctl certs issue DIR IDENTITY")
    pids = {name: week.pid(name) for name in ("coordinator", SLOT)}
    ends_at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=SOON_S)
    for path in ("coordinator", f"stage/{SLOT}"):
        week.issue(path, ends_at)
    address = week.stage()["registration"]["address"]
    with rlctl.connect(week.endpoint, tls=week.issue("trainer/t", ends_at)) as fleet:
        for server in (week.endpoint, address):
            assert presented(server) is not None  # a process reads its files at a handshake
        publisher, model = fleet.publisher("actor"), demo_tiny.make(seed=1)
        before = publisher.update(model, version="before", pause="retract").version.sequence
        assert sequence(fleet) == before
        time.sleep(max(0.0, (ends_at - datetime.datetime.now(datetime.UTC)).total_seconds()) + 1)

        # Connections that exist go on.
        after = publisher.update(model, version="after", pause="retract").version.sequence
        assert sequence(fleet) == after > before
        # The coordinator's.
        status = rlctl_command("status")
        assert status.returncode == 5
        row.shows(status.stderr)
        assert f"{week.endpoint}: its certificate, of rlctl://lab/coordinator, expired at" in status.stderr
        finding = week.doctor()[week.endpoint]
        assert (finding["check"], finding["verdict"]) == ("coordinator", "failure")
        assert "rlctl certs issue DIR coordinator" in finding["mend"]
        assert "rlctl://lab/coordinator expired at" in Ran("logs", "coordinator", "-n", "50").out
        week.issue("coordinator")
        assert rlctl_command("status").returncode == 0
        assert week.pid("coordinator") == pids["coordinator"]
        # The stage's: all connections end with a coordinator.
        os.kill(pids["coordinator"], signal.SIGKILL)
        until(lambda: week.pid("coordinator") != pids["coordinator"], "no new coordinator")
        until(lambda: Ran("status").code == 0, "the coordinator does not answer")
        until(lambda: "expired at" in Ran("status").out, "no cause is shown")
        assert week.stage()["state"] == "STAGE_STATE_JOINING", "the new coordinator has not met it"
        row.shows(Ran("status").out)
        assert f"its certificate, of rlctl://lab/stage/{SLOT}, expired at" in Ran("describe", "stage", SLOT).out
        findings = week.doctor()
        for subject in (f"rlctl://lab/stage/{SLOT}", f"stage {SLOT}"):
            assert findings[subject]["verdict"] == "failure"
            assert f"rlctl certs issue DIR stage/{SLOT}" in findings[subject]["mend"]
        # The trainer's.
        with pytest.raises(RlctlError) as caught:
            publisher.update(model, version="late", pause="retract", deadline_s=30)
        assert caught.value.reason is Reason.TLS_FAILED
        row.shows(str(caught.value))
        assert "trainer/t.crt (rlctl://lab/trainer/t), which expired at" in str(caught.value)
        assert "rlctl certs issue DIR trainer/t" in caught.value.next_step
        for path in ("trainer/t", f"stage/{SLOT}"):
            week.issue(path)
        week.sound()
        again = publisher.update(model, version="again", pause="retract").version.sequence
        assert sequence(fleet) == again > after
        assert week.pid(SLOT) == pids[SLOT]
        publisher.close()
    assert not week.doctor().keys() & {f"rlctl://lab/stage/{SLOT}", f"stage {SLOT}", week.endpoint}


@pytest.fixture
def fleet(week: Week) -> Iterator[Fleet]:
    with rlctl.connect(week.endpoint, tls=week.issue("client/watcher")) as connected:
        yield connected
    week.clocks.set({})


def test_wall_clocks_jump_ahead_and_back(week: Week, fleet: Fleet) -> None:
    row = Row("a clock jumps")
    pids = {"coordinator": week.pid("coordinator"), SLOT: week.pid(SLOT), "trainer": week.trainer.process.pid}
    started, published = time.time(), week.trainer.publish("before")["sequence"]
    assert Ran("pause", "--ttl", "1h", "--yes").code == 0
    for ahead_s in (2 * HOUR_S, -2 * HOUR_S):
        ahead = {"coordinator": ahead_s, SLOT: -ahead_s, "trainer": ahead_s / 2}
        week.clocks.set({pids[name]: seconds for name, seconds in ahead.items()})
        if ahead_s > 0:
            time.sleep(3)
            assert week.stage()["state"] == "STAGE_STATE_PAUSED", "its hour has not passed"
            assert Ran("continue", "--yes").code == 0
        found = week.doctor()
        for name in ("coordinator", SLOT):
            finding = found[f"clock of {name}"]
            row.shows(f"clock of {name} {finding['seen']}", NAME=name)
            assert finding["verdict"] == "failure"
            assert finding["seen"] == f"2h00m {'ahead of' if ahead[name] > 0 else 'behind'} this host's"
            assert "timedatectl" in finding["mend"]
        # Leases run on: whatever is published is served, and nothing else.
        ends = time.monotonic() + GRANTED_S
        while time.monotonic() < ends:
            told = week.trainer.publish(f"after-{published}")
            assert abs(told["clock"] - time.time() - ahead["trainer"]) < 60, told
            assert told.get("sequence") == published + 1, told
            published += 1
            assert sequence(fleet) == published
            time.sleep(1)
        newest = fleet.operations(verb="WeightUpdate", page_size=1)[0]
        assert newest.weight_version.sequence == published, "the latest is listed first"
        assert abs(newest.create_time.ToNanoseconds() / 1e9 - time.time() - ahead_s) < 60
    for operation in fleet.operations():
        took_s = (operation.done_time.ToNanoseconds() - operation.create_time.ToNanoseconds()) / 1e9
        assert 0 <= took_s < time.time() - started + 60, operation
    for line in Ran("operations").out.splitlines():
        assert not re.search(r"\s-\d", line), line
    week.clocks.set({})
    assert not any(subject.startswith("clock") for subject in week.doctor())
    assert len(Ran("audit", "--limit", "0", "-o", "json").data) >= published - 1


def test_a_clock_is_so_wrong_that_certificates_look_expired(week: Week, fleet: Fleet) -> None:
    row = Row("a clock is wrong by more than the validity of a certificate")
    before = sequence(fleet)
    pid = week.pid("coordinator")
    week.clocks.set({pid: 200 * DAY_S})
    status = rlctl_command("status")
    assert status.returncode == 5
    row.shows(status.stderr)
    assert "timedatectl" in status.stderr
    assert sequence(fleet) == before, "connections that exist go on"
    week.clocks.set({pid: -200 * DAY_S})
    assert rlctl_command("status").returncode == 5
    week.clocks.set({})
    assert rlctl_command("status").returncode == 0
    row.step("timedatectl")
