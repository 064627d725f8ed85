"""What ``rlctl up`` refuses before it starts anything, and what it would start."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import Cli

from rlctl.cli.app.settings import Settings
from rlctl.launch.deployment import Deployment
from rlctl.launch.interface.spec import EngineSpec
from rlctl.launch.supervisor import fleet_state


@pytest.fixture
def up(checkpoint: Callable[[str], str]) -> list[str]:
    return ["up", "--hf-checkpoint", checkpoint("one"), "--engine", "fake", "--listen", "127.0.0.1:0"]


def test_ranks_must_be_divisible_by_those_of_an_engine(cli: Cli, up: list[str]) -> None:
    ran = cli(*up, "--rollout-num-gpus", "5", "--rollout-num-gpus-per-engine", "2")
    assert ran.code == 2
    assert "5 is not divisible by num_gpus_per_engine 2: 2 engines leave 1 over" in ran.err
    ran = cli(*up, "--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2")
    assert "1 engine leaves 1 over" in ran.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--hf-checkpoint", "/nowhere"], "/nowhere"),
        (["--rollout-num-gpus", "0"], "0 is not in the range"),
        (["--option", "pace"], "'pace' is not NAME=VALUE"),
        (["--listen", "5080"], "--listen: '5080' is not HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "or pass --insecure"),
    ],
)
def test_bad_arguments_are_usage_errors(cli: Cli, up: list[str], arguments: list[str], complaint: str) -> None:
    ran = cli(*up, *arguments)
    assert ran.code == 2
    assert complaint in ran.err


def test_an_access_file_needs_a_token_of_the_fleet(cli: Cli, up: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLCTL_ACCESS_FILE", "/x/access.json")
    ran = cli(*up)
    assert ran.code == 2
    assert "the fleet has no token of its own" in ran.err
    monkeypatch.setenv("RLCTL_TOKEN", "t")
    assert cli(*up, "--dry-run").code == 0


def test_a_dry_run_says_what_would_be_started(cli: Cli, up: list[str], tmp_path: Path) -> None:
    plan = cli(*up, "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2", "--dry-run", "-o", "json").data
    assert [engine["slot"] for engine in plan["engines"]] == ["actor-0", "actor-1"]
    assert {engine["tp_size"] for engine in plan["engines"]} == {2}
    assert not (tmp_path / "state").exists()
    shown = cli(*up, "--model", "ref", "--dry-run", "--option", "pace=0.1")
    assert "ref-0" in shown.out
    assert "pace=0.1" in shown.out
    assert "Nothing was done." in shown.err


def test_taking_down_what_is_not_up_fails_with_a_clear_message(cli: Cli) -> None:
    ran = cli("down", "--name", "lab")
    assert ran.code == 2, "a name that does not exist"
    assert "no fleet 'lab' is up on this machine" in ran.err
    assert cli("down", "-o", "json").error["exit_code"] == 2


FLEET = fleet_state.FleetState(
    "lab", os.getpid(), fleet_state.identity(os.getpid()), fleet_state.READY, "127.0.0.1:1", "/x"
)


@pytest.mark.parametrize(
    "written",
    [
        *(b"", b"\xff", b"[]", b'{"name": "lab"}', b"[" * 100_000),
        *(json.dumps(dataclasses.asdict(FLEET) | wrong).encode() for wrong in (
            {"pid": str(FLEET.pid)}, {"pid": 1.5}, {"started": None}, {"processes": None}, {"gateways": []}, {"more": 1}
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_read_of_a_fleet_is_told_and_nothing_is_done(cli: Cli, written: bytes) -> None:
    fleet_state.write(FLEET)
    file = fleet_state.state_directory("lab") / "fleet.json"
    file.write_bytes(written)
    ran = cli("down", "--name", "lab", "--dry-run")
    assert ran.code == 1
    assert f"the state of fleet 'lab' in {file} cannot be read" in ran.err
    assert file.read_bytes() == written
    assert fleet_state.up() == []


def test_a_fleet_that_ends_while_it_is_asked_about_is_down(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as supervisor:
        fleet_state.write(dataclasses.replace(FLEET, pid=supervisor.pid, started=fleet_state.identity(supervisor.pid)))

        def confirm(*_: object) -> None:
            supervisor.communicate()

        monkeypatch.setattr(Settings, "confirm", confirm)
        ran = cli("down", "--name", "lab")
    assert (ran.code, ran.err) == (0, "Fleet lab is down.\n")


@pytest.mark.parametrize("again", [False, True])
def test_a_process_that_outlives_its_supervisor_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """No kill ends a process in a system call that does not return. It holds its GPU."""
    me = os.getpid()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as supervisor:
        started = fleet_state.identity(supervisor.pid)
        identities = {"actor-0": fleet_state.identity(me)}
        fleet = dataclasses.replace(
            FLEET, pid=supervisor.pid, started=started, processes={"actor-0": me}, identities=identities
        )
        fleet_state.write(fleet)

        def confirm(*_: object) -> None:
            supervisor.communicate()

        monkeypatch.setattr(Settings, "confirm", confirm)
        if again:
            supervisor.communicate()
        ran = cli("down", "--name", "lab")
    assert ran.code == 1
    assert (
        f"its supervisor {'' if not again else f'{fleet.pid} '}has ended; still ending: actor-0 (pid {me})" in ran.err
    )
    assert "is down.\n" not in ran.err
    assert fleet_state.read("lab") == fleet


def test_a_fleet_of_another_user_is_not_taken_down(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet_state.write(FLEET)

    def kill(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", kill)
    ran = cli("down", "--name", "lab", "-o", "json")
    assert ran.code == 1
    assert ran.error["message"] == f"supervisor {FLEET.pid} belongs to another user; nothing was done"
    assert fleet_state.read("lab") == FLEET


def test_a_process_that_ends_while_it_is_looked_at_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own answer to whoever opened its file before, and reads it after that."""

    def read_text(file: Path) -> str:
        raise ProcessLookupError(errno.ESRCH, "No such process", str(file))

    monkeypatch.setattr(Path, "read_text", read_text)
    assert fleet_state.identity(os.getpid()) == ""


@pytest.mark.parametrize("arguments", [(), ("-d",)])
def test_where_the_state_cannot_be_kept_is_told_by_name(
    cli: Cli, up: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    ran = cli(*up, *arguments)
    assert ran.code == 1
    assert f"{tmp_path}/file/rlctl/default" in ran.err
    assert "Not a directory" in ran.err


def test_what_a_fleet_is_started_from_is_not_overwritten_by_another_start(cli: Cli, up: list[str]) -> None:
    """Two at once: the first one's supervisor would run the second one's engines, and log into the same file."""
    directory = fleet_state.state_directory()
    files = [directory / "deployment.json", directory / "logs" / "supervisor.log"]
    with fleet_state.claimed("default"):
        for file in files:
            file.parent.mkdir(exist_ok=True)
            file.write_text("the first one's")
        ran = cli(*up, "-d")
    assert ran.code == 7
    assert "fleet 'default' is up already" in ran.err
    assert [file.read_text() for file in files] == ["the first one's"] * 2


def test_processes_of_a_supervisor_that_died_are_waited_for_and_named(
    cli: Cli, up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold the journal and the ports. This test is one of them; its parent only has the pid of another."""
    me, other = os.getpid(), os.getppid()
    identities = {"coordinator": fleet_state.identity(me), "actor-0": "another process"}
    processes = {"coordinator": me, "actor-0": other}
    dead = fleet_state.FleetState(
        "default", 2**22 + 1, "gone", fleet_state.READY, "", "", processes, identities=identities
    )
    fleet_state.write(dead)
    monkeypatch.setattr("rlctl.cli.commands.up.SURVIVE_S", 0.2)
    ran = cli(*up)
    assert ran.code == 7
    assert "has died; waiting for coordinator to end" in ran.err
    assert f"still run 0.2 s after its supervisor died: coordinator (pid {me})" in ran.err
    assert f"kill {me}" in ran.err


def test_the_last_lines_of_a_log_are_shown_and_names_that_are_there(cli: Cli) -> None:
    assert "there are: none" in cli("logs", "actor-0").err
    logs = fleet_state.state_directory("lab") / "logs"
    logs.mkdir(parents=True)
    (logs / "actor-0.log").write_text("".join(f"line {number} {'x' * 2000}\n" for number in range(200)) + "not yet")
    (logs / "actor-0.1.log").write_text("")
    ran = cli("logs", "actor-0", "--name", "lab", "-n", "60")
    assert ran.code == 0
    assert [line.split()[1] for line in ran.out.splitlines()] == [str(number) for number in range(140, 200)]
    told = cli("logs", "actor-0", "--name", "lab", "-n", "1", "-o", "json").data
    assert (told["process"], told["log"]) == ("actor-0", str(logs / "actor-0.log"))
    assert [line.split()[1] for line in told["lines"]] == ["199"]
    assert cli("logs", "actor-0.1", "--name", "lab").out == ""
    wrong = cli("logs", "../lock", "--name", "lab")
    assert wrong.code == 2
    assert "there are: actor-0, actor-0.1" in wrong.err


def test_only_engines_of_a_fleet_that_is_up_are_restarted(cli: Cli) -> None:
    assert "no fleet 'default' is up" in cli("restart", "actor-0", "--yes").err
    me = os.getpid()
    deployment = Deployment("default", "127.0.0.1:0", (EngineSpec("actor-0", "/m"),))
    fleet_state.write(
        fleet_state.FleetState(
            "default", me, fleet_state.identity(me), fleet_state.READY, "", "", deployment=deployment.data
        )
    )
    wrong = cli("restart", "actor-7", "--yes")
    assert (wrong.code, "has no engine 'actor-7'; there are: actor-0" in wrong.err) == (2, True)
    dry = cli("restart", "actor-0", "--dry-run")
    assert (dry.code, "would be drained and started again" in dry.err) == (0, True)


def test_a_fleet_that_is_up_is_not_started_over(cli: Cli, up: list[str], tmp_path: Path) -> None:
    me = os.getpid()
    fleet_state.write(fleet_state.FleetState("default", me, fleet_state.identity(me), fleet_state.READY, "", ""))
    file = tmp_path / "fleet.yaml"
    file.write_text('{"models": [{"name": "actor", "server_groups": [{"worker_type": "regular", "num_gpus": 1}]}]}')
    ran = cli("up", str(file), *up[1:], "--new")
    assert ran.code == 7, ran.err
    assert "cannot be started over" in ran.err
