"""What owns a fleet goes on while it cannot tell anybody."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from children import Children
from cli_helpers import Cli

from rlctl.cli.app.settings import Settings
from rlctl.contract.errors import DeadlineExceeded, Reason, RlctlError
from rlctl.launch.deployment import Deployment
from rlctl.launch.engine_lifecycle import Limits
from rlctl.launch.interface.spec import EngineSpec, Reservation
from rlctl.launch.supervisor import fleet_state, supervisor
from rlctl.launch.supervisor.control_socket import Requests, apply, listening
from rlctl.launch.supervisor.supervisor import _Supervisor
from rlctl.runtime import private_files


def is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Full(io.StringIO):
    """A log on a disk that is full."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_end_a_fleet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    holder = _Supervisor(Settings(), Deployment("lab", "127.0.0.1:0", ()))
    with monkeypatch.context() as disk:
        disk.setattr(private_files, "write_text", is_full)
        for _ in range(3):
            holder._tell_state(fleet_state.READY)
        assert capsys.readouterr().err.count("No space left on device") == 1, "told once"
        disk.setattr(sys, "stderr", Full())
        holder._say("actor-0: starting again")
        holder._tell_state(fleet_state.READY)
    assert fleet_state.read("lab") is None
    holder._tell_state(fleet_state.READY)
    found = fleet_state.read("lab")
    assert found is not None
    assert found.phase == fleet_state.READY


def test_the_endpoint_is_known_before_the_engines_are_up() -> None:
    holder = _Supervisor(Settings(), Deployment("lab", "127.0.0.1:0", ()))
    holder._fleet.address = "127.0.0.1:7"
    holder._tell_state(fleet_state.STARTING)
    (fleet,) = fleet_state.up()
    assert (fleet.phase, fleet.endpoint) == (fleet_state.STARTING, "127.0.0.1:7")
    assert fleet.deployment == {}, "nothing is planned against a fleet that starts"


def test_processes_that_no_kill_ends_stay_on_record() -> None:
    me = os.getpid()
    processes, identities = {"actor-0": me}, {"actor-0": fleet_state.identity(me)}
    state = fleet_state.FleetState(
        "lab", me, "gone", fleet_state.READY, "127.0.0.1:7", "", processes, identities=identities
    )
    fleet_state.write(state)
    supervisor._remove_state("lab")
    assert fleet_state.read("lab") == state
    fleet_state.write(dataclasses.replace(state, identities={"actor-0": "ended"}))
    supervisor._remove_state("lab")
    assert not fleet_state.state_file("lab").exists()


class Refusing(Children):
    """A launcher that has no room for engines that are called so."""

    def make_room(self, engines: Sequence[EngineSpec], places: Sequence[Reservation]) -> None:
        if any(spec.slot == "too-much" for spec in engines):
            raise Reason.FIELD_INVALID.error("there is no room", field="num_gpus")


class Asked:
    """A change that somebody wants, planned against what was known then."""

    def __init__(self, holder: _Supervisor, *slots: str, restart: bool = True, listen: str = "127.0.0.1:0") -> None:
        engines = tuple(EngineSpec(slot, "/m") for slot in slots)
        self.deployment = Deployment("lab", listen, engines, restart=restart)
        self.against = json.loads(json.dumps(holder._deployed))
        self.restart: Sequence[str] = ()
        self.force = False
        self.said: list[str] = []
        self.error: RlctlError | None = None
        self.state: fleet_state.FleetState | None = None

    def say(self, line: str) -> None:
        self.said.append(line)

    def failed(self, error: RlctlError) -> None:
        self.error = error

    def done(self, found: fleet_state.FleetState) -> None:
        self.state = found


class Coming:
    """Requests that come one after the other."""

    def __init__(self, *requests: Asked) -> None:
        self.left = list(requests)

    def wait(self, timeout_s: float) -> Asked | None:
        del timeout_s
        return self.left.pop(0) if self.left else None


@pytest.fixture
def holder() -> _Supervisor:
    """Of a fleet of nothing, whose launcher is the test."""
    holder = _Supervisor(Settings(), Deployment("lab", "127.0.0.1:0", ()))
    holder._fleet._launcher = Refusing()
    holder._tell_state(fleet_state.READY)
    return holder


def kept() -> Deployment:
    """What the next plan is made against."""
    found = fleet_state.read("lab")
    assert found is not None
    return Deployment.of(found.deployment)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.0.0.1:1"])
def test_a_refused_change_is_not_what_the_fleet_is_kept_at(holder: _Supervisor, listen: str) -> None:
    """By the launcher, or because it cannot change. Engines would be left alone that nobody started again."""
    before = kept()
    refused = Asked(holder, "too-much", restart=False, listen=listen)
    holder._apply(refused, Coming())  # type: ignore[arg-type]
    assert refused.error is not None
    assert refused.error.reason is (Reason.FIELD_INVALID if listen.endswith(":0") else Reason.FIELD_CONFLICT)
    holder._tell_state(fleet_state.READY)
    assert kept() == before
    assert holder._deployment.restart
    assert holder._fleet.engines == []


def test_limits_that_change_hold_for_engines_that_run(holder: _Supervisor) -> None:
    first, later = Asked(holder, "a"), Asked(holder, "a")

    class Then(Coming):
        def wait(self, timeout_s: float) -> Asked | None:
            later.against = Asked(holder).against
            later.deployment = Deployment("lab", "127.0.0.1:0", later.deployment.engines, limits=Limits(load_s=0))
            return super().wait(timeout_s)

    holder._apply(first, Then(later))  # type: ignore[arg-type]
    assert later.error is not None
    assert "a: it did not load within 0 s" in later.error.message


def test_a_change_that_was_planned_against_another_fleet_is_refused(holder: _Supervisor) -> None:
    """Two at once: GPUs would be given out twice, and what the other has added removed unasked."""
    first, second = Asked(holder), Asked(holder, "b")
    first.deployment = Deployment("lab", "127.0.0.1:0", (), restart=False)
    holder._apply(first, Coming(second))  # type: ignore[arg-type]
    assert first.state is not None
    holder._apply(second, Coming())  # type: ignore[arg-type]
    assert second.error is not None
    assert second.error.reason is Reason.OPERATION_CONFLICT
    assert "has been changed since this was planned" in second.error.message
    assert holder._fleet.engines == []


def test_a_change_that_does_not_come_to_an_end_gives_way_to_the_next(holder: _Supervisor) -> None:
    stuck = Asked(holder, "a")
    stale = Asked(holder, "b")

    class Then(Coming):
        """Planned when the first one was under way already."""

        def wait(self, timeout_s: float) -> Asked | None:
            if not self.left:
                self.left = [Asked(holder, "a"), Asked(holder)]
                self.asked = list(self.left)
                self.asked[1].against = self.asked[0].against
            return super().wait(timeout_s)

    then = Then(stale)
    holder._apply(stuck, then)  # type: ignore[arg-type]
    same, other = then.asked
    assert stale.error is not None
    assert "since this was planned" in stale.error.message
    for superseded in (stuck, same):
        assert superseded.error is not None
        assert superseded.error.reason is Reason.OPERATION_CONFLICT
        assert "another `rlctl up`" in superseded.error.message
    assert other.state is not None
    assert "a: stopped" in other.said
    assert kept().engines == ()


def test_who_cannot_be_heard_does_not_end_a_fleet() -> None:
    """Without a file descriptor nobody who asks can be let in; every engine ended with the supervisor."""

    def accept() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    listener: Any = SimpleNamespace(settimeout=lambda _: None, accept=accept)
    assert Requests(listener).wait(0.01) is None


@pytest.fixture
def running(tmp_path: Path) -> fleet_state.FleetState:
    """What is known of a fleet whose supervisor is the test."""
    pid, deployment = os.getpid(), json.loads(json.dumps(Deployment("lab", "127.0.0.1:0", ()).data))
    return fleet_state.FleetState(
        "lab", pid, fleet_state.identity(pid), fleet_state.READY, "127.0.0.1:1", str(tmp_path), {}, deployment
    )


def test_a_change_takes_no_longer_than_its_time_however_much_is_told(running: fleet_state.FleetState) -> None:
    """An engine that loads is told of again and again."""
    left, said = threading.Event(), []  # type: ignore[var-annotated]

    def talk(requests: Requests) -> None:
        request = requests.wait(10)
        assert request is not None
        while not left.wait(0.1):
            request.say("actor-1: still loading")
        request.done(running)

    with listening(Path(running.directory)) as requests:
        talking = threading.Thread(target=talk, args=(requests,))
        talking.start()
        threading.Timer(5, left.set).start()  # or a test that fails would not end
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"not done after 0.5 s; the supervisor goes on"):
            apply(running, Deployment.of(running.deployment), said.append, timeout_s=0.5)
        assert time.monotonic() - began < 4
        left.set()
        talking.join()
    assert said


def test_a_fleet_of_another_version_is_told_to_be_one(
    running: fleet_state.FleetState, cli: Cli, tmp_path: Path
) -> None:
    """As after an upgrade of rlctl: a supervisor that cannot read what is wanted has not ended."""
    newer = dataclasses.replace(running, deployment=running.deployment | {"colour": "blue"})
    wanted = SimpleNamespace(name="lab", data=newer.deployment)
    with listening(Path(running.directory)) as requests:
        asked = threading.Thread(target=requests.wait, args=(10,))
        asked.start()
        with pytest.raises(RlctlError, match="different versions of rlctl") as caught:
            apply(running, wanted, lambda _: None, timeout_s=10)  # type: ignore[arg-type]
        asked.join()
    assert caught.value.reason is Reason.UNSUPPORTED
    fleet_state.write(newer)
    file = tmp_path / "lab.yaml"
    groups = "[{worker_type: regular, num_gpus: 1}]"
    file.write_text(f"models: [{{name: a, model_path: {tmp_path}, engine: fake, server_groups: {groups}}}]")
    for command in ("plan", "up"):
        ran = cli(command, str(file), "--name", "lab", "-o", "json")
        assert ran.error["reason"] == "UNSUPPORTED"
        assert "different versions of rlctl" in ran.error["message"]


@pytest.mark.parametrize(("served_s", "longest_s"), [(120.0, 1.0), (0.0, 60.0)], ids=["weeks", "at once"])
def test_a_coordinator_that_ends_again_and_again_is_waited_for_only_if_it_does_so_at_once(
    holder: _Supervisor, monkeypatch: pytest.MonkeyPatch, served_s: float, longest_s: float
) -> None:
    now = 1000.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    fleet: Any = SimpleNamespace(directory=Path("/nowhere"), address="127.0.0.1:1", coordinator=None)
    monkeypatch.setattr(holder, "_fleet", fleet)
    process = SimpleNamespace(returncode=None, failure=lambda: Reason.ENGINE_FAILED.error("it was killed"))
    fleet.restart_coordinator = lambda: setattr(process, "returncode", None)
    fleet.coordinator = process
    gone_s = []
    for _ in range(10):
        now += served_s
        ended, process.returncode = now, -9
        while process.returncode is not None:
            holder._look_at_coordinator()
            now += 0.25
        gone_s.append(now - ended)
    assert max(gone_s) == pytest.approx(longest_s, abs=0.5)
