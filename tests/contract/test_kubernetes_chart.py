"""The Helm chart: what Helm and the schemas of Kubernetes say of it, and of wrong values."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_chart import CASES, CHART, render, rendered, secrets

from rlctl.version import __version__

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

MODEL = VALUES["models"][0]
GATEWAY = VALUES["gateways"][0]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name that does not exist": ({"token": {"secert": "rlctl"}}, "'/token': additional properties 'secert'"),
    "another type": ({"metrics": {"enabled": "yes"}}, "'/metrics/enabled': got string, want boolean"),
    "an unknown engine": ({"models": [{**MODEL, "engine": "sgl"}]}, "'/models/0/engine': value must be one of"),
    "an unknown dialect": ({"gateways": [{**GATEWAY, "dialect": "a"}]}, "'/gateways/0/dialect': value must be one of"),
    "a model without replicas": (
        {"models": [{key: value for key, value in MODEL.items() if key != "replicas"}]},
        "'/models/0': missing property 'replicas'",
    ),
    "a relative path": (
        {"models": [{**MODEL, "checkpoint": {**MODEL["checkpoint"], "path": "actor"}}]},
        "'/models/0/checkpoint/path': 'actor' does not match pattern",
    ),
    "a path outside of its volume": (
        {"models": [{**MODEL, "checkpoint": {**MODEL["checkpoint"], "path": "/modelsactor"}}]},
        'models.0.checkpoint.path: "/modelsactor" is not below checkpoint.mountPath "/models"',
    ),
    "a wrong duration": ({"coordinator": {"auditRetention": "90"}}, "'/coordinator/auditRetention': '90' does not"),
    "no authentication": ({"token": {"secret": "", "key": "token"}}, "token.secret: is empty while tls.enabled is"),
    "certificates without TLS": ({"tls": {"certManager": {"enabled": True}}}, "tls.certManager.enabled: is true while"),
    "certificates without an issuer": (
        {"tls": {"enabled": True, "certManager": {"enabled": True}}},
        "tls.certManager.issuer.name: is empty",
    ),
    "a monitor of nothing": ({"serviceMonitor": {"enabled": True}}, "serviceMonitor.enabled: is true while"),
    "two models of a name": ({"models": [MODEL, MODEL]}, 'models.1.name: "actor" is the name of an earlier entry'),
    "two gateways of a name": ({"gateways": [GATEWAY] * 2}, 'gateways.1.name: "sglang" is the name of an earlier'),
    "a model named as another object": (
        {"models": [{**MODEL, "name": "coordinator"}]},
        'models.0.name: "coordinator" is the name of another object',
    ),
    "a long name": (
        {"fullnameOverride": "a" * 40, "models": [{**MODEL, "name": "b" * 12}]},
        "models.0.name: ",
    ),
    "a torch engine of several ranks": (
        {"models": [{**MODEL, "engine": "torch", "tensorParallel": 2}]},
        "models.0.tensorParallel: an engine of torch has one rank",
    ),
    "arguments of no container": (
        {"models": [{**MODEL, "engine": "torch", "engineArgs": ["--a"]}]},
        "models.0.engineArgs: torch has no container of its own",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_helm_and_the_schemas_accept_the_objects(name: str) -> None:
    case = rendered(name)
    assert case.error == ""
    assert case.lint == []
    assert case.invalid == []
    assert len(case.objects) >= 5


def test_the_cases_render_every_template() -> None:
    kinds = {each["kind"] for name in CASES for each in rendered(name).objects}
    assert kinds == {
        "Certificate", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount",
        "ServiceMonitor", "StatefulSet",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("template", "text", "replacement", "message"),
    [
        ("coordinator.yaml", "replicas: 1", "replica: 1", "StatefulSet rlctl-coordinator at 1.29"),
        ("poddisruptionbudgets.yaml", "policy/v1", "policy/v1beta1", "PodDisruptionBudget rlctl-actor at 1.29"),
        ("servicemonitor.yaml", "jobLabel", "joblabel", "ServiceMonitor rlctl"),
    ],
)
def test_the_schemas_refuse_a_wrong_template(
    template: str, text: str, replacement: str, message: str, tmp_path: Path
) -> None:
    chart = tmp_path / "rlctl"
    shutil.copytree(CHART, chart)
    path = chart / "templates" / template
    assert text in path.read_text()
    path.write_text(path.read_text().replace(text, replacement))
    metrics = {"metrics": {"enabled": True}, "serviceMonitor": {"enabled": True}}
    assert any(error.startswith(message) for error in render({"wrong": metrics}, chart)["wrong"].invalid)


def test_helm_refuses_wrong_values_and_names_them() -> None:
    cases = render({name: values for name, (values, _) in WRONG.items()})
    assert {name: WRONG[name][1] in case.error for name, case in cases.items()} == dict.fromkeys(WRONG, True), {
        name: case.error for name, case in cases.items()
    }


def names(schema: Any) -> Iterator[str]:
    """The names of values in a schema."""
    if isinstance(schema, dict):
        if isinstance(fields := schema.get("properties"), dict):
            yield from fields
        for each in schema.values():
            yield from names(each)


def test_values_yaml_names_every_value() -> None:
    text = (CHART / "values.yaml").read_text()
    assert {name for name in names(SCHEMA) if not re.search(rf"\b{name}\b", text)} == {"global"}, "Helm's own"


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    assert chart["version"] == __version__.replace(".dev", "-dev")  # Helm takes semantic versions only


@pytest.mark.parametrize("name", CASES)
def test_the_notes_name_every_secret(name: str) -> None:
    case = rendered(name)
    made = {each["spec"]["secretName"] for each in case.of("Certificate")}
    references = {reference for spec in case.workloads.values() for reference in secrets(spec)}
    for secret, key in references:
        lines = [line.strip() for line in case.notes.splitlines() if line.strip().startswith(f"{secret}: ")]
        assert secret in made or any(key in line for line in lines), (secret, key)
    assert references
