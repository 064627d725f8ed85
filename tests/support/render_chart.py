"""Render a Helm chart with Helm's library, and check its objects against the schemas of Kubernetes.

Runs in the environment of tools/helm: ``python render_chart.py CHART`` with a JSON object of values on stdin, by case.
Prints a JSON object by case: ``error`` of Helm or "", messages of ``lint``, ``notes``, ``objects``, and ``invalid``:
what the schemas refuse. Uses no network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml
from custom_resources import SCHEMAS

VERSIONS = ("1.29", "1.37")
"""The oldest version that Chart.yaml permits, and the newest that kubernetes-validate has."""
NAME, NAMESPACE = "rlctl", "rl"
INFO = 1


def render(chart: helm_python.Chart, path: str, values: dict[str, Any]) -> dict[str, Any]:
    """Render one case. ``helm install`` checks the values first; the library has a function for each step."""
    case: dict[str, Any] = {"error": "", "lint": [], "notes": "", "objects": [], "invalid": []}
    try:
        chart.validate_schema(values)
        files = chart.render(values, name=NAME, namespace=NAMESPACE)
    except helm_python.HelmError as error:
        return {**case, "error": str(error)}
    report = helm_python.lint(path, values, strict=True, namespace=NAMESPACE)
    case["lint"] = [message["error"] for message in report["messages"] if message["severity"] > INFO]
    for name, text in files.items():
        if name.endswith("NOTES.txt"):
            case["notes"] = text
        else:
            case["objects"] += [each for each in yaml.safe_load_all(text) if each]
    case["invalid"] = [error for each in case["objects"] for error in check(each)]
    return case


def check(thing: dict[str, Any]) -> Iterator[str]:
    name = f"{thing['kind']} {thing['metadata']['name']}"
    if thing["kind"] in SCHEMAS:
        for error in jsonschema.Draft202012Validator(SCHEMAS[thing["kind"]]).iter_errors(thing):
            yield f"{name}: {error.json_path}: {error.message}"
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(thing, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            yield f"{name} at {version}: {error.message}"


if __name__ == "__main__":
    with helm_python.Chart.load(sys.argv[1]) as chart:
        cases = json.load(sys.stdin)
        json.dump({name: render(chart, sys.argv[1], values) for name, values in cases.items()}, sys.stdout)
