"""The chart in kubernetes/rlctl, rendered with its defaults and with each file of its directory ci."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "kubernetes" / "rlctl"
CASES: dict[str, dict[str, Any]] = {"defaults": {}} | {
    path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text())
    for path in sorted(CHART.glob("ci/*-values.yaml"))
}
Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """A case: ``error`` of Helm or "", messages of ``lint``, ``notes``, ``objects``, and what the schemas refuse."""

    error: str
    lint: list[str]
    notes: str
    objects: list[Object]
    invalid: list[str]

    def of(self, *kinds: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] in kinds]

    def named(self, kind: str) -> dict[str, Object]:
        return {each["metadata"]["name"]: each["spec"] for each in self.of(kind)}

    @property
    def workloads(self) -> dict[str, Object]:
        """The specs of StatefulSets and Deployments by name."""
        return {**self.named("StatefulSet"), **self.named("Deployment")}


def render(cases: Mapping[str, Mapping[str, Any]], chart: Path = CHART) -> dict[str, Rendered]:
    """Render cases of values. Skips the test without Helm."""
    place = subprocess.run([ROOT / "tools" / "helm", "path"], capture_output=True, text=True, check=False)
    if place.returncode:
        pytest.skip("Helm is not installed here: tools/helm install")
    command = [Path(place.stdout.strip()) / "python", Path(__file__).with_name("render_chart.py"), chart]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: Rendered(**case) for name, case in json.loads(done.stdout).items()}


@functools.cache
def _all() -> dict[str, Rendered]:
    return render(CASES)


def rendered(name: str) -> Rendered:
    """A case of CASES."""
    return _all()[name]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def argv(container: Object) -> list[str]:
    return [*container["command"], *container.get("args", ())]


def option(container: Object, name: str) -> str:
    """The value of ``--name=value``, or ""."""
    return next((each.split("=", 1)[1] for each in argv(container) if each.startswith(f"--{name}=")), "")


def variables(container: Object) -> dict[str, Any]:
    """Each variable with its value, or with the reference that it comes from."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container.get("env", ())}


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def secrets(spec: Object) -> Iterator[tuple[str, str]]:
    """Secret and key of every reference in a workload; the key is "" for a whole secret."""
    pod = spec["template"]["spec"]
    for volume in pod["volumes"]:
        if secret := volume.get("secret"):
            yield from ((secret["secretName"], item["key"]) for item in secret.get("items", ()))
            if "items" not in secret:
                yield secret["secretName"], ""
    for container in containers(pod):
        for value in variables(container).values():
            if isinstance(value, dict) and "secretKeyRef" in value:
                yield value["secretKeyRef"]["name"], value["secretKeyRef"]["key"]
