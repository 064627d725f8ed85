"""Which fleet a command is about: an explicit one, or the only one of this machine that is up."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from cli_helpers import Cli, LiveFleet

from rlctl.cli.app.local_fleets import DEFAULT_ENDPOINT
from rlctl.cli.app.settings import Settings, config_file
from rlctl.contract.errors import Unavailable
from rlctl.launch.deployment import Deployment
from rlctl.launch.interface.spec import EngineSpec
from rlctl.launch.supervisor import fleet_state

SAID = "the only fleet up on this machine"


def up(name: str, endpoint: str) -> fleet_state.FleetState:
    """A fleet whose supervisor is this process."""
    pid = os.getpid()
    deployment = Deployment(name, endpoint, (EngineSpec("actor-0", "/m"),)).data
    fleet = fleet_state.FleetState(
        name,
        pid,
        fleet_state.identity(pid),
        fleet_state.READY,
        endpoint,
        str(fleet_state.state_directory(name)),
        deployment=deployment,
    )
    fleet_state.write(fleet)
    return fleet


def died(name: str, endpoint: str) -> None:
    """A fleet whose supervisor left its state file behind."""
    fleet_state.write(fleet_state.FleetState(name, os.getpid(), "another process", fleet_state.READY, endpoint, ""))


def logged(name: str) -> None:
    logs = fleet_state.state_directory(name) / "logs"
    logs.mkdir(parents=True)
    (logs / "actor-0.log").write_text(f"log of {name}\n")


def test_the_only_fleet_that_is_up_is_found_under_any_name(cli: Cli, rlctl: LiveFleet) -> None:
    up("lab", rlctl.endpoint)
    died("default", "127.0.0.1:1")
    ran = cli("status", "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    assert [stage["registration"]["slot"] for stage in ran.data["stages"]] == ["a", "b"]


def test_a_change_says_which_fleet_it_goes_to(cli: Cli, rlctl: LiveFleet) -> None:
    up("lab", rlctl.endpoint)
    ran = cli("pause", "--mode", "retract")
    first, *_, last = ran.err.splitlines()
    assert (ran.code, first) == (0, f"Fleet lab at {rlctl.endpoint}, {SAID}.")
    assert last.startswith("PauseGeneration OK: 2 of 2 stages confirmed")
    assert cli("disable", "a").err.count(SAID) == 1
    assert SAID not in cli("pause", "--mode", "retract", "--dry-run").err
    assert SAID not in rlctl("continue").err, "an explicit endpoint needs no word"
    assert SAID not in cli("continue", "-q").err


def test_a_change_says_where_it_goes_before_it_asks(
    cli: Cli, rlctl: LiveFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    up("lab", rlctl.endpoint)
    said: list[str] = []
    monkeypatch.setattr(Settings, "say", lambda _, line: said.append(line))
    monkeypatch.setattr(Settings, "confirm", lambda _, question, **__: said.append(question))
    assert cli("pause").code == 0
    assert SAID in said[0]
    assert said[1].startswith("Without --mode")
    said.clear()
    assert cli("take-over", "a").code == 0
    assert SAID in said[0]


def test_in_a_format_for_machines_an_error_stays_the_only_line(cli: Cli, rlctl: LiveFleet) -> None:
    up("lab", rlctl.endpoint)
    ran = cli("disable", "nowhere", "-o", "json")
    assert (ran.code, ran.error["fleet"]) == (2, {"name": "lab", "endpoint": rlctl.endpoint})
    done = cli("disable", "a", "-o", "json")
    assert (done.code, done.err) == (0, f"Fleet lab at {rlctl.endpoint}, {SAID}.\n")


def test_a_repeated_command_names_the_fleet_that_was_found(cli: Cli) -> None:
    up("lab", "127.0.0.1:1")
    ran = cli("pause", "--mode", "retract", "-o", "json")
    assert ran.code == 5
    assert "--endpoint 127.0.0.1:1" in ran.error["retry"]


def test_an_ended_coordinator_of_the_chosen_fleet_refers_to_its_supervisor(cli: Cli) -> None:
    """`rlctl up` would be refused: the fleet is up."""
    up("lab", "127.0.0.1:1")
    ran = cli("status", "-o", "json")
    assert (ran.code, ran.error["next_step"]) == (
        5,
        "`rlctl logs supervisor --name lab` shows whether the coordinator starts again.",
    )


def test_an_endpoint_that_is_set_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    up("lab", "127.0.0.1:7")
    settings = Settings()
    assert settings.endpoint == "127.0.0.1:7"
    assert settings.fleet_choice.fleet is not None
    config_file().parent.mkdir(parents=True)
    config_file().write_text("current: far\ncontexts: {far: {endpoint: far:3}}")
    settings = Settings()
    assert settings.endpoint == "far:3"
    settings.flags["endpoint"] = "flag:2"  # of the option, or else of the environment
    assert settings.endpoint == "flag:2"
    assert settings.fleet_choice.fleet is None


def test_several_fleets_that_are_up_are_listed_with_how_to_choose(cli: Cli) -> None:
    up("lab", "127.0.0.1:7")
    up("other", "127.0.0.1:8")
    died("third", "127.0.0.1:9")
    ran = cli("status")
    assert ran.code == 2
    assert "2 fleets are up on this machine: 'lab' at 127.0.0.1:7, 'other' at 127.0.0.1:8" in ran.err
    assert "--endpoint or RLCTL_ENDPOINT" in ran.err
    assert "third" not in ran.err
    for command in (["restart", "actor-0", "--yes"], ["logs", "actor-0"], ["down", "--yes"]):
        ran = cli(*command)
        assert ran.code == 2
        assert "2 fleets are up on this machine: 'lab' at 127.0.0.1:7, 'other' at 127.0.0.1:8" in ran.err
        assert "--name" in ran.err
    assert cli("restart", "actor-0", "--name", "other", "--dry-run").code == 0


def test_without_a_fleet_that_is_up_the_default_address_is_taken(cli: Cli) -> None:
    died("lab", "127.0.0.1:7")
    assert Settings().endpoint == DEFAULT_ENDPOINT
    ran = cli("down", "--yes")
    assert (ran.code, "no fleet 'default' is up on this machine; fleets that are up: none" in ran.err) == (2, True)


def test_a_fleet_is_found_that_comes_up_later() -> None:
    settings = Settings()
    assert settings.endpoint == DEFAULT_ENDPOINT
    up("lab", "127.0.0.1:7")
    assert settings.endpoint == "127.0.0.1:7"
    up("other", "127.0.0.1:8")
    assert settings.endpoint == "127.0.0.1:7", "a command stays with the fleet that it has found"


def test_a_fleet_whose_coordinator_does_not_listen_yet_is_unreachable() -> None:
    fleet_state.write(dataclasses.replace(up("lab", ""), phase=fleet_state.STARTING))
    with pytest.raises(Unavailable, match="fleet 'lab' is still starting"):
        _ = Settings().endpoint


def test_logs_are_those_of_the_fleet_that_is_up(cli: Cli) -> None:
    for name in ("default", "lab"):
        logged(name)
    assert cli("logs", "actor-0").out == "log of default\n", "none is up, and the logs are kept"
    up("lab", "127.0.0.1:7")
    assert cli("logs", "actor-0").out == "log of lab\n"
    assert cli("logs", "actor-0", "--name", "default").out == "log of default\n"
    assert "fleets with logs (--name): default, lab" in cli("logs", "actor-7").err


def test_a_restart_says_which_fleet_it_goes_to(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = up("lab", "127.0.0.1:7")
    monkeypatch.setattr("rlctl.launch.supervisor.control_socket.apply", lambda *_, **__: lab)
    ran = cli("restart", "actor-0", "--yes")
    assert (ran.code, ran.err.splitlines()[0]) == (0, f"Fleet lab at 127.0.0.1:7, {SAID}.")
    ran = cli("restart", "actor-0", "--yes", "-o", "json")
    assert json.loads(ran.out)["name"] == "lab"
    assert ran.err.splitlines()[-1] == f"Fleet lab at 127.0.0.1:7, {SAID}."


@pytest.mark.parametrize("spelt", ["127.0.0.1:8", "localhost:8", "0.0.0.0:8"])
def test_an_endpoint_that_is_set_chooses_the_fleet_of_logs_too(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, spelt: str
) -> None:
    for name, endpoint in (("lab", "127.0.0.1:7"), ("other", "127.0.0.1:8")):
        up(name, endpoint)
        logged(name)
    monkeypatch.setenv("RLCTL_ENDPOINT", spelt)
    assert cli("logs", "actor-0").out == "log of other\n"


def test_an_endpoint_of_no_local_fleet_is_not_replaced_by_one_that_is_up(cli: Cli) -> None:
    up("lab", "127.0.0.1:7")
    for command in (["restart", "actor-0", "--yes"], ["logs", "actor-0"], ["down", "--yes"]):
        ran = cli("--endpoint", "far:7", *command)
        assert ran.code == 2
        assert "no fleet of this machine is up at far:7; fleets that are up: 'lab' at 127.0.0.1:7" in ran.err


@pytest.fixture(autouse=True)
def _no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor of these fleets is the test itself."""

    def kill(*_: object) -> None:
        raise AssertionError("a fleet was taken down")

    monkeypatch.setattr(os, "kill", kill)
