"""The commands in the chart's containers: this version of rlctl, SGLang and vLLM know them, and their ports fit."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import click
import pytest
from kubernetes_chart import CASES, ROOT, Object, argv, containers, option, rendered, variables

from rlctl.cli.main import root as cli
from rlctl.engine import known_options
from rlctl.transport.tls.identity import Identity

LISTENING = {
    "listen": {"coordinator": "grpc", "stage": "commands", "gateway": "http"},
    "rollout-listen": {"stage": "generation"},
    "data-listen": {"stage": "data"},
    "metrics": dict.fromkeys(("coordinator", "stage", "gateway"), "metrics"),
    "web": {"coordinator": "web"},
}


def commands(name: str) -> Iterator[tuple[Object, Object]]:
    """Each workload of a case with each of its containers that runs rlctl."""
    for spec in rendered(name).workloads.values():
        for one in containers(spec["template"]["spec"]):
            if one["command"][0] == "rlctl":
                yield spec, one


@pytest.mark.parametrize("name", CASES)
def test_a_command_is_one_of_this_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for _, container in commands(name):
        _, command, *arguments = argv(container)
        parent = click.Context(cli)
        for variable, value in variables(container).items():
            if variable.startswith("RLCTL_"):
                monkeypatch.setenv(variable, value)
        known = cli.get_command(parent, command)
        assert known is not None
        known.make_context(command, arguments, parent=parent)
        seen.add(command)
    assert seen >= {"coordinator", "stage"}


@pytest.mark.parametrize("name", CASES)
def test_its_variables_are_those_of_this_version(name: str) -> None:
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    variables_of_rlctl = {each for _, one in commands(name) for each in variables(one) if each.startswith("RLCTL_")}
    assert "RLCTL_LOG_FORMAT" in variables_of_rlctl
    assert {each for each in variables_of_rlctl if not re.search(rf"\b{each}\b", reference)} == set()


@pytest.mark.parametrize("name", CASES)
def test_it_listens_on_the_ports_of_its_container(name: str) -> None:
    for _, container in commands(name):
        command = argv(container)[1]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        listening = {}
        for setting, port_names in LISTENING.items():
            host, _, port = option(container, setting).rpartition(":")
            if host == "0.0.0.0":
                listening[port_names[command]] = int(port)
            else:
                assert host in ("", "127.0.0.1")
        assert listening == ports


@pytest.mark.parametrize("name", CASES)
def test_it_calls_the_coordinator_of_the_release(name: str) -> None:
    services = rendered(name).named("Service")
    for _, container in commands(name):
        if (coordinator := option(container, "coordinator")) or argv(container)[1] != "coordinator":
            host, _, port = coordinator.partition(":")
            assert {"name": "grpc", "port": int(port), "targetPort": "grpc"} in services[host]["ports"]


@pytest.mark.parametrize("name", CASES)
def test_a_reference_to_a_variable_comes_after_it(name: str) -> None:
    """Kubernetes replaces $(NAME) in arguments, and in the values of later variables."""
    for spec in rendered(name).workloads.values():
        for one in containers(spec["template"]["spec"]):
            defined: set[str] = set()
            for variable, value in variables(one).items():
                assert set(re.findall(r"\$\((\w+)\)", str(value))) <= defined
                defined.add(variable)
            assert set(re.findall(r"\$\((\w+)\)", " ".join(argv(one)))) <= defined


@pytest.mark.parametrize("name", CASES)
def test_its_files_are_below_its_mounts(name: str) -> None:
    for _, container in commands(name):
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        paths = [str(value) for value in variables(container).values() if str(value).startswith("/")]
        paths += [path for each in argv(container) for path in re.findall(r"=(/[^:]+)", each)]
        assert [path for path in paths if not any(f"{path}/".startswith(f"{mount}/") for mount in mounts)] == []
        assert paths


@pytest.mark.parametrize("name", CASES)
def test_engine_and_stage_server_agree(name: str) -> None:
    for spec, stage in commands(name):
        for engine in spec["template"]["spec"].get("initContainers", ()):
            port = option(engine, "port")
            assert option(engine, "host") == "127.0.0.1"
            assert f"--option=url=http://127.0.0.1:{port}" in argv(stage)
            assert f":{port}/" in engine["startupProbe"]["exec"]["command"][-1]
            assert f" {port})" in stage["livenessProbe"]["exec"]["command"][-1]
            assert option(stage, "model-path") in (option(engine, "model-path"), option(engine, "model"))
            assert option(stage, "tp-size") in (option(engine, "tp-size"), option(engine, "tensor-parallel-size"))
            # Without a stage server the engine starts again: the data port is the sign of one.
            data = {each["name"]: each["containerPort"] for each in stage["ports"]}["data"]
            assert engine["livenessProbe"]["tcpSocket"]["port"] == data


def test_certificates_have_the_identities_of_their_processes() -> None:
    case = rendered("cert-manager")
    identities = {}
    for certificate in case.of("Certificate"):
        (uri,) = certificate["spec"]["uris"]
        assert Identity.of(uri).server_name in certificate["spec"]["dnsNames"]
        identities[certificate["spec"]["secretName"]] = uri
    for spec, container in commands("cert-manager"):
        (volume,) = [each for each in spec["template"]["spec"]["volumes"] if each["name"] == "tls"]
        if argv(container)[1] == "stage":
            assert option(container, "slot") == "$(POD_NAME)"
            attributes = volume["csi"]["volumeAttributes"]
            identity = Identity.of(attributes["csi.cert-manager.io/uri-sans"].replace("${POD_NAME}", "rlctl-actor-0"))
            assert (identity.role, identity.name) == ("stage", "rlctl-actor-0")
            assert attributes["csi.cert-manager.io/dns-names"] == identity.server_name
        else:
            identity = Identity.of(identities.pop(volume["secret"]["secretName"]))
            assert identity.role == argv(container)[1]
    assert identities == {}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_installed_engine_knows_the_arguments(engine: str) -> None:
    place = subprocess.run([ROOT / "tools" / "engines", "path", engine], capture_output=True, text=True, check=False)
    if place.returncode:
        pytest.skip(f"{engine} is not installed here: tools/engines install {engine}")
    known = known_options(engine, {"python": f"{place.stdout.strip()}/bin/python"})
    assert known is not None
    arguments = {
        each.removeprefix("--").partition("=")[0].replace("-", "_")
        for name in CASES
        for spec, stage in commands(name)
        for container in spec["template"]["spec"].get("initContainers", ())
        for each in container["args"]
        if option(stage, "engine") == engine
    }
    assert len(arguments) > 5
    assert arguments - known.names - known.taken.keys() == set()
