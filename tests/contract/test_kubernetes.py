"""The manifest in examples/kubernetes: its parts refer to each other, and its commands are this version's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from rlctl.cli.main import root as cli

FILE = Path(__file__).parents[2] / "examples" / "kubernetes" / "rlctl.yaml"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all(FILE.read_text()))


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {thing["metadata"]["name"]: thing["spec"] for thing in OBJECTS if thing["kind"] == kind}


def pods() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for spec in named("StatefulSet").values():
        yield spec, spec["template"]["spec"]


def commands() -> list[list[str]]:
    lines = [
        [*container["command"], *container.get("args", ())] for _, pod in pods() for container in pod["containers"]
    ]
    return [line[1:] for line in lines if line[0] == "rlctl"]


@pytest.mark.parametrize("command", commands(), ids=lambda command: command[0])
def test_a_command_is_one_of_this_version(command: list[str]) -> None:
    parent = click.Context(cli)
    found = cli.get_command(parent, command[0])
    assert found is not None
    found.make_context(command[0], list(command[1:]), parent=parent)


def test_it_has_a_coordinator_and_engines_that_find_it() -> None:
    assert [command[0] for command in commands()] == ["coordinator", "stage"]
    (stage,) = (dict(flag.split("=", 1) for flag in line[1:]) for line in commands() if line[0] == "stage")
    host, port = stage["--coordinator"].split(":")
    assert int(port) in [each["port"] for each in named("Service")[host]["ports"]]


def test_what_is_referred_to_is_there() -> None:
    for spec, pod in pods():
        assert spec["serviceName"] in named("Service")
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        assert named("Service")[spec["serviceName"]]["selector"] == spec["selector"]["matchLabels"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            given = {variable["name"] for variable in container.get("env", ())}
            text = " ".join(container.get("args", ()))
            assert {name for name in ("POD_NAME", "POD_IP") if f"$({name})" in text} <= given
