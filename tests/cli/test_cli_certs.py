"""``rlctl certs``, and the certificate that a command line uses."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest
import yaml
from cli_helpers import Cli

from rlctl.cli.app.settings import Settings, config_file
from rlctl.launch.supervisor import fleet_state
from rlctl.transport.tls.authority import Authority


def test_a_ca_is_made_once_and_issues_certificates(cli: Cli, tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    made = cli("certs", "init", str(directory), "--fleet", "lab", "-o", "json").data
    assert made == {"ca": f"{directory}/ca.crt", "key": f"{directory}/ca.key", "fleet": "lab"}
    issued = cli("certs", "issue", str(directory), "coordinator", "--host", "rl.example.com", "-o", "json").data
    assert issued["identity"] == "rlctl://lab/coordinator"
    assert issued["cert"] == f"{directory}/coordinator.crt"
    assert "rlctl://lab/stage/actor-0" in cli("certs", "issue", str(directory), "stage/actor-0").out
    again = cli("certs", "init", str(directory), "-o", "json")
    assert (again.code, again.error["reason"]) == (7, "OPERATION_CONFLICT")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["king"], "'king' is not one of coordinator, stage"),
        (["stage"], "not of the form stage/NAME"),
        (["coordinator", "--days", "100000"], "before a certificate of 100000 days does"),
        (["gateway/g", "--host", "ü"], "is no host name"),
    ],
)
def test_a_certificate_that_cannot_be_issued_is_refused(
    cli: Cli, tmp_path: Path, arguments: list[str], why: str
) -> None:
    Authority.init(tmp_path, "lab")
    ran = cli("certs", "issue", str(tmp_path), *arguments)
    assert ran.code == 2
    assert why in ran.err
    assert {path.name for path in tmp_path.iterdir()} == {"ca.crt", "ca.key"}


def test_a_server_refuses_half_of_its_files_and_a_certificate_of_another_role(cli: Cli, tmp_path: Path) -> None:
    files = Authority.init(tmp_path / "tls", "lab").issue("stage/a")
    journal = ["--journal", str(tmp_path / "journal.db")]
    ran = cli("coordinator", *journal, "--tls-cert", str(files.cert))
    assert ran.code == 2
    assert "--tls-ca or RLCTL_TLS_CA" in ran.err


def test_a_certificate_comes_from_the_environment_the_context_or_a_fleet_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.init(tmp_path / "tls", "lab")
    assert Settings().tls is False
    me = os.getpid()
    fleet_state.write(
        fleet_state.FleetState(
            "lab", me, fleet_state.identity(me), fleet_state.READY, "127.0.0.1:1", "/x",
            deployment={"tls": str(authority.directory)},
        )
    )  # fmt: skip
    found = Settings().tls
    assert found
    assert str(found.identity) == f"rlctl://lab/client/{getpass.getuser()}"
    settings = Settings()
    settings.flags["endpoint"] = "10.0.0.1:5080"
    assert settings.tls is False, "another fleet's certificates are not used"

    named = {f"tls_{name}": str(path) for name, path in vars(authority.issue("client/context")).items()}
    config_file().parent.mkdir(parents=True)
    config_file().write_text(yaml.safe_dump({"current": "lab", "contexts": {"lab": named}}))
    found = Settings().tls
    assert found
    assert found.identity.name == "context"
    for name, value in authority.issue("client/environment").variables.items():
        monkeypatch.setenv(name, value)
    found = Settings().tls
    assert found
    assert found.identity.name == "environment"
